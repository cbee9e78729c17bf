// Programmatic dependent launch: a grid that is launched `early` (optimized/cuda/launch.py) may start while the one before
// it in the stream is ending, and so is set up by the time that its input is there.
#pragma once

namespace twin {

// In the earlier grid: the next one may start once every block has called this or ended, and there is room.
__device__ __forceinline__ void let_next_grid_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// In the next grid: returns when the earlier one has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_grid_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace twin
