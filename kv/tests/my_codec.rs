//! The example codec passes the conformance tests through its tensor form.

#[path = "../examples/my_codec.rs"]
#[allow(dead_code, unreachable_pub, reason = "the program prints what the tests assert")]
mod example;

perplexity_kv::codec_conformance!(my_codec, example::ON_HOST, bits = 5.0, error = 0.085);
