// What a function calls where its caller has nothing to add.
#pragma once

namespace twin {

struct Nothing {
    template <class... Arguments>
    __device__ __forceinline__ void operator()(const Arguments&...) const {}
};

}  // namespace twin
