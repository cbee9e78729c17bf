// Programmatic dependent launch: a grid that is launched `early` (optimized/launch.py) may start while the one before
// it in the stream is at its end, so that it has been set up when its input is there.
#pragma once

namespace twin {

// Of the grid before: the next one may start as soon as every block has called this or ended, and there is room.
__device__ __forceinline__ void let_next_grid_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Of the next: returns when the grid before has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_grid_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace twin
