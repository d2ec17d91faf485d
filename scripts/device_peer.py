#!/usr/bin/env python3
"""What PyTorch reaches on the card that `device_bench.sh` measures: GEMM, attention, and Hugging Face's own forward pass.

Run on the machine with the GPU: `python3 scripts/device_peer.py [gemm] [attention] [delta] [model]`; `delta` needs
the package flash-linear-attention, with which `model` is faster too.
Prints one Markdown table row per measurement. Random bf16 data, three warm-up runs, median of the timed runs.
"""

import statistics
import sys
import time

import torch

DEVICE = "cuda"
DTYPE = torch.bfloat16
WARM_UP, RUNS = 3, 9


def median_ms(run, runs=RUNS):
    """Median milliseconds of `run()` between CUDA events."""
    for _ in range(WARM_UP):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def normal(*shape, std=1.0):
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE) * std


def gemm():
    print("| GEMM m x k x n | ms | TFLOP/s |\n|---|---:|---:|")
    for m, k, n in [(16384, 5120, 14336), (16384, 5120, 34816), (16384, 17408, 5120), (8192, 8192, 8192)]:
        x, w = normal(m, k), normal(n, k, std=0.02)
        ms = median_ms(lambda: torch.nn.functional.linear(x, w))
        print(f"| {m} x {k} x {n} | {ms:.3f} | {2 * m * k * n / ms / 1e9:.0f} |")
    source = torch.randn(1 << 30, device=DEVICE)
    target = torch.empty_like(source)
    ms = median_ms(lambda: target.copy_(source))
    print(f"\nCopy of 4 GiB: {ms:.3f} ms, {2 * source.numel() * 4 / ms / 1e6:.0f} GB/s read + written")


def attention():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    print("\n| causal attention, 24 heads, 4 KV heads, head_dim 256 | ms | TFLOP/s |\n|---|---:|---:|")
    for batch, tokens in [(4, 4096), (1, 16384), (1, 65536)]:
        q, k, v = normal(batch, 24, tokens, 256), normal(batch, 4, tokens, 256), normal(batch, 4, tokens, 256)
        flops = 2.0 * batch * 24 * 256 * tokens * tokens
        for backend in [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]:
            try:
                with sdpa_kernel(backend):
                    ms = median_ms(
                        lambda: torch.nn.functional.scaled_dot_product_attention(
                            q, k, v, is_causal=True, enable_gqa=True
                        ),
                        3,
                    )
                print(f"| {batch} x {tokens}, {backend.name} | {ms:.3f} | {flops / ms / 1e9:.0f} |")
            except RuntimeError as error:
                print(f"| {batch} x {tokens}, {backend.name} | refused: {str(error).splitlines()[0][:80]} | |")


def delta():
    """flash-linear-attention's chunked gated delta rule, the kernels Hugging Face uses where they are installed."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    print("\n| gated delta rule (flash-linear-attention), 48 heads of 128 | ms |\n|---|---:|")
    for batch, tokens in [(4, 4096), (8, 4096), (1, 16384), (1, 65536)]:
        q, k, v = (normal(batch, tokens, 48, 128) for _ in range(3))
        g = -torch.rand(batch, tokens, 48, device=DEVICE) * 0.1
        beta = torch.rand(batch, tokens, 48, device=DEVICE, dtype=DTYPE)
        with torch.inference_mode():
            ms = median_ms(lambda: chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True), 5)
        print(f"| {batch} x {tokens} | {ms:.3f} |", flush=True)


def model():
    """Hugging Face's Qwen3.5 text model at the 27B geometry with a few layers; tokens/s scaled to 64 layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    layers = 4
    config = AutoConfig.for_model(
        "qwen3_5_text",
        hidden_size=5120,
        num_hidden_layers=layers,
        intermediate_size=17408,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        vocab_size=248320,
        tie_word_embeddings=False,
    )
    with torch.device(DEVICE):
        net = AutoModelForCausalLM.from_config(config, dtype=DTYPE).eval()
    print("\n| transformers forward, 4 layers of the 27B geometry | ms | tokens/s at 64 layers (layers only) |\n|---|---:|---:|")
    for batch, tokens in [(1, 4096), (4, 4096)]:
        ids = torch.randint(0, 248000, (batch, tokens), device=DEVICE)
        with torch.inference_mode():
            ms = median_ms(lambda: net.model(input_ids=ids, use_cache=False), 3)
        print(f"| {batch} x {tokens} | {ms:.1f} | {batch * tokens / ms * 1e3 * layers / 64:.0f} |", flush=True)


def main():
    wanted = sys.argv[1:] or ["gemm", "attention", "delta", "model"]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    for name in wanted:
        {"gemm": gemm, "attention": attention, "delta": delta, "model": model}[name]()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
