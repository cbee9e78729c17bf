// A matrix whose columns lie in up to three tensors, as a kernel's argument.
//
//     x[r, g * width + c] = part[i].x[r, g * part[i].width + c - part[i].first]   part i holds column c of a group
//
// part[i].x [rows, groups * part[i].width], a part's width a multiple of 8.
#pragma once
#include "common/wide.cuh"

namespace twin {

struct Part {
    const wide_t* x;
    int first, width;  // columns of a group
};

struct Parts {
    Part part[3];  // an unused one begins after a group's last column
    int groups, width;

    // The part that has a column, and where the column is in it.
    struct Found {
        const Part& part;
        int col;
    };
    __device__ __forceinline__ Found find(int col) const {
        const int group = col / width, within = col % width;
        const Part& p = part[(within >= part[1].first) + (within >= part[2].first)];
        return {p, group * p.width + within - p.first};
    }
    __device__ __forceinline__ unsigned stride(const Part& p) const { return groups * p.width; }
};

}  // namespace twin
