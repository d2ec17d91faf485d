//! The training program of the `vq2` codebook.

#[path = "../examples/train_vq2_codebook.rs"]
#[allow(dead_code, unreachable_pub, reason = "only the functions of the program are tested")]
mod program;

use perplexity_kv::codecs::vq2::{CODEBOOK, PATTERNS, WORD};

#[test]
fn training_is_reproducible_and_lowers_the_distortion() {
    let (first, second) = (program::train(3, 20_000, 6), program::train(3, 20_000, 6));
    assert_eq!(first.bytes, second.bytes);
    assert_ne!(first.bytes, program::train(4, 20_000, 6).bytes);
    assert_eq!(first.bytes.len(), PATTERNS * WORD);
    assert!(
        first.history.windows(2).all(|pair| pair[1] < pair[0]),
        "{:?}",
        first.history
    );
    assert!(first.distortion < first.history[0]);
}

#[test]
fn the_shipped_table_has_its_published_distortion() {
    let levels: Vec<i8> = CODEBOOK.iter().map(|byte| *byte as i8).collect();
    // 0.08851 on the 600,000 training words before rounding to integers.
    let distortion = program::table_distortion(&levels, 5, 200_000);
    assert!((distortion - 0.0885).abs() < 0.0015, "{distortion}");
}
