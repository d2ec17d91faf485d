// sum[row] += share * output for the rows that chose an expert: `choices` are places in shares[rows, top_k].
struct ExpertInfo {
    u64 width, top_k, each;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_expert(const double *__restrict__ outputs, const u32 *__restrict__ choices, const float *__restrict__ shares,
               double *__restrict__ sum, const __grid_constant__ ExpertInfo info) {
    const u64 column = (u64)blockIdx.y * 256 + threadIdx.x, choice = choices[blockIdx.x], each = info.each;
    if (column >= info.width) return;
    double *target = sum + choice / info.top_k * info.width + column;
    const double output = step_bf16(outputs[blockIdx.x * info.width + column], each);
    *target = step_bf16(plus(*target, step_bf16(times(shares[choice], output), each)), each);
}

// out = residual + (sum + sigmoid(score) * shared), rows `first_row..` of residual and out.
struct MixtureInfo {
    u64 first_row, width, type, each, to;
};
extern "C" __global__ void __launch_bounds__(256)
    f64_mixture(const void *__restrict__ residual, const double *__restrict__ sum, const double *__restrict__ shared_output,
                const double *__restrict__ scores, void *__restrict__ out, const __grid_constant__ MixtureInfo info) {
    const u64 column = (u64)blockIdx.y * 256 + threadIdx.x, each = info.each;
    if (column >= info.width) return;
    const u64 i = blockIdx.x * info.width + column, target = info.first_row * info.width + i;
    const double open = step_bf16(sigmoid(step_bf16(scores[blockIdx.x], each)), each);
    const double all = step_bf16(plus(sum[i], step_bf16(times(open, step_bf16(shared_output[i], each)), each)), each);
    store(out, info.to, target, plus(load(residual, info.type, target), all), info.to);
}
