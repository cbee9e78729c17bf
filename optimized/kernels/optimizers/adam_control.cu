// adam_control: the numbers of a step of Adam from what lies on the device; formulas: reference/ops/optimizers/adam_capturable.py.
//
//     skip = found_inf != 0, step += !skip, c = fp32(1 - beta^step), control = [lr, c1, c2, fp32(1 / grad_scale), skip]
//
// One thread. beta^step by squarings and products in float64, as reference.ops.optimizers.adam.correction. grad_scale and found_inf
// may be null. beta1 and beta2 are float64 words.

__device__ __forceinline__ float correction(double beta, int step) {
    double power = 1.0;
    for (; step != 0; step >>= 1) {
        power = power * (step & 1 ? beta : 1.0);
        beta = beta * beta;
    }
    return static_cast<float>(1.0 - power);
}

extern "C" __global__ void __launch_bounds__(1)
    adam_control(int* step, const float* lr, const float* grad_scale, const float* found_inf, long long beta1,
                 long long beta2, int bias_correction, float* control) {
    const bool skip = found_inf != nullptr && *found_inf != 0.0f;
    const int count = *step + (skip ? 0 : 1);
    *step = count;
    control[0] = *lr;
    control[1] = bias_correction ? correction(__longlong_as_double(beta1), count) : 1.0f;
    control[2] = bias_correction ? correction(__longlong_as_double(beta2), count) : 1.0f;
    control[3] = grad_scale == nullptr ? 1.0f : static_cast<float>(1.0 / static_cast<double>(*grad_scale));
    control[4] = skip ? 1.0f : 0.0f;
}
