// Products of the tensor core, as warps issue them.
#pragma once

#include "machine.h"
#include "memory.h"
#include "tensor_core.h"

namespace simulator {

namespace {

Matrix operand(Format format, uint64_t descriptor, bool transposed, int first, int rows, int k) {
    const bool half = format == kBF16 || format == kFP16;
    const std::vector<Code>& codes = codes_of(format);
    const unsigned start = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4;
    const unsigned stride = (descriptor >> 32 & 0x3FFF) << 4;
    if (descriptor >> 62 != 1) fail("a descriptor of another swizzle than 128 bytes: %#llx", (unsigned long long)descriptor);
    const unsigned char* base = from_shared(0, 1);
    const size_t size = fiber()->block->size;
    Matrix matrix{rows, k, {}};
    matrix.codes.resize(static_cast<size_t>(rows) * k);
    for (int row = 0; row < rows; row++)
        for (int i = 0; i < k; i++) {
            const unsigned r = first + row;
            const unsigned at = transposed ? start + r / 64 * leading + i / 8 * stride + i % 8 * 128 + r % 64 * 2
                                           : start + r / 8 * stride + r % 8 * 128 + i * (half ? 2 : 1);
            const unsigned to = swizzled(at);
            if (to + 2 > size) fail("an operand of the tensor core is outside of shared memory: %#x", to);
            matrix.codes[row * k + i] = &codes[half ? base[to] | base[to + 1] << 8 : base[to]];
        }
    return matrix;
}

void execute(Pending& pending) {
    const Product& product = pending.product;
    const bool half = product.a_format == kBF16 || product.a_format == kFP16;
    const int k = half ? 16 : 32, rank = fiber()->linear / 32 % 4;
    Matrix a{16, k, {}};
    if (pending.from_registers) {
        const std::vector<Code>& codes = codes_of(product.a_format);
        a.codes.resize(16 * k);
        const int each = half ? 2 : 4;  // values of a register
        for (int row = 0; row < 16; row++)
            for (int i = 0; i < k; i++) {
                const int half_k = i / (4 * each), lane = row % 8 * 4 + i % (4 * each) / each;
                const unsigned word = pending.registers[lane][2 * half_k + row / 8];
                a.codes[row * k + i] = &codes[half ? word >> 16 * (i % 2) & 0xFFFF : word >> 8 * (i % 4) & 0xFF];
            }
    } else
        a = operand(product.a_format, product.a, product.a_transposed, 16 * rank, 16, k);
    const Matrix b = operand(product.b_format, product.b, product.b_transposed, 0, product.columns, k);
    static thread_local float d[16][256];
    const auto place = [&](int row, int column) -> float& {
        return pending.d[row % 8 * 4 + column % 8 / 2][column / 8 * 4 + row / 8 * 2 + column % 2];
    };
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < product.columns; column++)
            d[row][column] = product.accumulates ? place(row, column) : 0.0f;
    multiply_rows(a, b, half, d);
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < product.columns; column++) place(row, column) = d[row][column];
    pending.done = true;
    machine->progress++;
}

}  // namespace

void multiply(const Product& product, float* d, const unsigned* registers) {
    Fiber* one = fiber();
    Warp& warp = *one->warp;
    const uint64_t number = warp.issued[one->lane]++ - warp.first;
    if (number == warp.products.size()) {
        warp.products.emplace_back();
        warp.products.back().product = product;
    }
    Pending& pending = warp.products[number];
    if (!(pending.product == product)) fail("the threads of a warp multiply different operands");
    pending.d[one->lane] = d;
    pending.from_registers = registers != nullptr;
    if (registers != nullptr) memcpy(pending.registers[one->lane], registers, sizeof pending.registers[0]);
    pending.arrived |= 1u << one->lane;
    machine->progress++;
    if (pending.arrived == 0xFFFFFFFF && at_once())
        for (Pending& other : warp.products) {
            if (other.arrived != 0xFFFFFFFF) break;
            if (!other.done) execute(other);
        }
}

void multiply_commit() { fiber()->warp->committed[fiber()->lane].push_back(fiber()->warp->issued[fiber()->lane]); }

void multiply_wait(int pending) {
    Fiber* one = fiber();
    Warp& warp = *one->warp;
    auto& groups = warp.committed[one->lane];
    uint64_t target = 0;
    while (static_cast<int>(groups.size()) > pending) {
        target = groups.front();
        groups.pop_front();
    }
    exchange(0xFFFFFFFF, target);
    for (uint64_t number = warp.first; number < target; number++) {
        Pending& other = warp.products[number - warp.first];
        if (!other.done) execute(other);
    }
    while (!warp.products.empty() && warp.products.front().done) {
        warp.products.pop_front();
        warp.first++;
    }
}

}  // namespace simulator
