//! The tensor form of every coder equals its host form on NdArray.

use perplexity_kv::conformance::{HEAD_DIM, tensor_equals_host};
use perplexity_kv::registry::variants;

type Tested = burn_ndarray::NdArray<f32>;

#[test]
fn tensors_equal_host_rows() {
    for variant in variants() {
        for side in [variant.k, variant.v] {
            tensor_equals_host::<Tested>(&*side.host(), &*side.tensor(), HEAD_DIM, 9);
        }
    }
}
