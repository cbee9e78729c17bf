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

    // Where an element lies, and how far the next row is from there.
    struct Place {
        const wide_t* x;
        unsigned stride;
    };
    __device__ __forceinline__ Place at(int row, int col) const {
        const int group = col / width, within = col % width;
        const Part& p = part[(within >= part[1].first) + (within >= part[2].first)];
        const unsigned stride = groups * p.width;
        return {p.x + static_cast<size_t>(row) * stride + group * p.width + within - p.first, stride};
    }
};

}  // namespace twin
