//! A codec of one's own, in tensor operations: asymmetric 4-bit codes per 32 values in the Hadamard basis.
//!
//! `cargo run --release --example my_codec -p perplexity-kv` prints what it stores and its error on Gaussian rows.

use burn::tensor::{Int, Tensor, backend::Backend};
use perplexity_kv::basis::Basis;
use perplexity_kv::codec::{CodecSpec, HEAD_DIM, OnTensors, TensorCodec, bits_per_value};
use perplexity_kv::conformance::{gaussian, round_trip_error};
use perplexity_kv::layout::{Layout, Plane};
use perplexity_kv::tensor_ops::{clamp, code_factor, decode_f16, encode_f16, encode_f16_signed, rne, scaled};

/// Values that share a range.
const GROUP: usize = 32;

/// `code = rne((x - z) / s)`, z = FP16(min), s = FP16((max - min) / 15); decode: `code * s + z`.
#[derive(Debug, Clone, Copy)]
pub struct MyCodec;

impl CodecSpec for MyCodec {
    fn basis(&self) -> Basis {
        Basis::Hadamard256
    }
    fn layout(&self, head_dim: usize) -> Layout {
        let groups = head_dim / GROUP;
        Layout(vec![
            Plane::new("codes", head_dim, 4),
            Plane::new("scales", groups, 16),
            Plane::new("zeros", groups, 16),
        ])
    }
}

impl<B: Backend> TensorCodec<B> for MyCodec {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let [tokens, heads, dim] = rows.dims();
        let groups = [tokens, heads, dim / GROUP];
        let x = rows.reshape([tokens, heads, dim / GROUP, GROUP]);
        // x - x is 0, or NaN where x is not finite: such a group keeps a NaN range.
        let poison = (x.clone() - x.clone()).sum_dim(3);
        let low = x.clone().min_dim(3) + poison.clone();
        let scale = encode_f16((x.clone().max_dim(3) - low.clone()) / 15.0 + poison);
        let zero = encode_f16_signed(low);
        let codes = scaled(x - decode_f16(zero.clone()), code_factor(decode_f16(scale.clone())));
        let codes = rne(clamp(codes, 0.0, 15.0)).int().reshape([tokens, heads, dim]);
        Tensor::cat(vec![codes, scale.reshape(groups), zero.reshape(groups)], 2)
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let [tokens, heads, count] = entries.dims();
        let groups = count / (GROUP + 2);
        let codes = entries
            .clone()
            .narrow(2, 0, groups * GROUP)
            .float()
            .reshape([tokens, heads, groups, GROUP]);
        let range = |first: usize| decode_f16(entries.clone().narrow(2, first, groups)).unsqueeze_dim::<4>(3);
        (codes * range(groups * GROUP) + range(groups * (GROUP + 1))).reshape([tokens, heads, groups * GROUP])
    }
}

/// The codec on host rows, as a cache takes it.
pub type OnFlex = OnTensors<burn_flex::Flex, MyCodec>;
/// See [`OnFlex`].
pub const ON_HOST: OnFlex = OnTensors::new(MyCodec);

fn main() {
    let error = round_trip_error(&ON_HOST, &gaussian(1, 1024 * HEAD_DIM), HEAD_DIM);
    println!("{} bits per value", bits_per_value(&ON_HOST, HEAD_DIM));
    println!(
        "relative error {:.4}, worst row {:.4}, cosine {:.5}",
        error.relative, error.worst, error.cosine
    );
}
