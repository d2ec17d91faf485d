// Per row of float32 logits [rows, stride]: the sum over the first `count` of exp(logit - largest), and the largest.
struct HeadInfo {
    u64 stride, count;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_head_sum(const float *__restrict__ logits, double *__restrict__ sums, const __grid_constant__ HeadInfo info) {
    __shared__ double shared[8];
    const float *row = logits + blockIdx.x * info.stride;
    double most = __longlong_as_double(0xfff0000000000000ll), sum = 0.0;
    for (u64 i = threadIdx.x; i < info.count; i += 256) most = fmax(most, (double)row[i]);
    most = block_reduce<true>(most, shared);
    for (u64 i = threadIdx.x; i < info.count; i += 256) sum += exp(row[i] - most);
    sum = block_reduce<false>(sum, shared);
    if (threadIdx.x == 0) {
        sums[2 * blockIdx.x] = sum;
        sums[2 * blockIdx.x + 1] = most;
    }
}
