//! The figures of `examples/codec_error_table.rs` agree with the published ones within their tolerances.

#[path = "../examples/codec_error_table.rs"]
#[allow(dead_code, unreachable_pub, reason = "the program prints what the tests assert")]
mod table;

fn assert_agreement(entries: Vec<table::Entry>) {
    let wrong: Vec<String> = entries
        .iter()
        .filter(|entry| !entry.agrees())
        .map(|entry| {
            format!(
                "{} {}: {} against {}",
                entry.name, entry.figure, entry.measured, entry.published
            )
        })
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn errors_on_gaussian_rows_are_the_published_ones() {
    assert_agreement(table::gaussian_table());
}

#[test]
fn errors_on_outlier_rows_are_the_published_ones() {
    assert_agreement(table::outlier_table());
}

#[test]
fn output_errors_of_whole_formats_are_the_published_ones() {
    assert_agreement(table::attention_table());
}

#[test]
fn kernel_forms_add_the_published_errors() {
    assert_agreement(table::kernel_table());
}
