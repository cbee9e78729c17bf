// Fibers: a stack and a place to go on from.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace simulator {

constexpr size_t kStack = 1 << 20;
enum When { kAtOnce, kLate, kAtRandom };

// --- fibers -----------------------------------------------------------------------------------------------------------
#ifdef __x86_64__
extern "C" void simulator_switch(void** save, void* to);
asm(R"(
.text
.globl simulator_switch
.type simulator_switch, @function
simulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
using Context = void*;
inline void swap(Context& save, Context& to) { simulator_switch(&save, to); }
inline void prepare(Context& context, unsigned char* stack, void (*entry)()) {
    auto* top = reinterpret_cast<uintptr_t*>(stack + kStack);
    *--top = 0;  // so that at the entry the stack is 8 bytes off a multiple of 16, as after a call
    *--top = reinterpret_cast<uintptr_t>(entry);
    for (int i = 0; i < 6; i++) *--top = 0;
    context = top;
}
#else
using Context = ucontext_t;
inline void swap(Context& save, Context& to) { swapcontext(&save, &to); }
inline void prepare(Context& context, unsigned char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#endif

}  // namespace simulator
