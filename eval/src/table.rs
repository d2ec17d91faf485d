//! The result table: first column 24 wide, left-aligned, then three of 15 behind a blank, right-aligned. Names are made
//! printable.

use std::io::{self, Write};
use std::path::Path;

use crate::humanize::{column, exponent_form, printable, significant};
use crate::report::{Figures, KlReport, Report};
use crate::statistics::by_context_line;
use crate::uncertainty::ClusterKind;
use crate::windows::WindowKind;

/// Writes the table of a finished run.
///
/// # Errors
/// When `out` fails.
pub fn write(out: &mut impl Write, report: &Report, report_path: &Path) -> io::Result<()> {
    let Report {
        artifact,
        corpus,
        execution,
        overall,
        ..
    } = report;
    let kind = match execution.windows {
        WindowKind::Sliding => "",
        WindowKind::Disjoint => " (disjoint windows)",
        WindowKind::LlamaChunks => " (llama.cpp chunks)",
    };
    writeln!(out, "Perplexity result")?;
    writeln!(out, "artifact: {}", printable(&artifact.name))?;
    writeln!(
        out,
        "kv: {}, corpus: {} / {}, context/stride: {}/{}{kind}",
        printable(&execution.settings.kv_dtype),
        printable(&corpus.id),
        printable(&corpus.mode),
        execution.context_tokens,
        execution.stride_tokens
    )?;
    if let Some(shard) = &report.shard {
        writeln!(out, "shard: {}/{} of the windows", shard.index, shard.count)?;
    }
    writeln!(out)?;
    writeln!(
        out,
        "{:<24} {:>15} {:>15} {:>15}",
        "domain", "tokens", "mean_nll", "ppl"
    )?;
    for domain in &report.domains {
        row(out, &domain.domain, &domain.figures)?;
    }
    row(out, "overall", &overall.figures)?;
    writeln!(out)?;
    uncertainty(out, report)?;
    if let (Some(bits), Some(words)) = (overall.text.bits_per_byte, overall.text.word_perplexity) {
        writeln!(
            out,
            "bits per byte: {bits:.6}, word perplexity: {}",
            significant(words, 6)
        )?;
    }
    if let Some(kl) = &report.kl_divergence {
        writeln!(out)?;
        divergence(out, kl)?;
    }
    writeln!(out)?;
    match report.timing.scored_tokens_per_second {
        Some(rate) => writeln!(out, "score rate: {rate:.1} tok/s")?,
        None => writeln!(out, "score rate: n/a")?,
    }
    for note in &report.notes {
        writeln!(out, "note: {}", printable(note))?;
    }
    writeln!(out, "report: \"{}\"", printable(&report_path.display().to_string()))
}

fn divergence(out: &mut impl Write, kl: &KlReport) -> io::Result<()> {
    let figures = &kl.detail.figures;
    if figures.positions == 0 {
        return writeln!(out, "KL divergence from reference: no position was compared");
    }
    writeln!(
        out,
        "KL divergence from reference: mean {}, top-1 agreement {:.4}",
        exponent_form(figures.mean_kl, 4),
        figures.top1_agreement
    )?;
    if let (Some(clustered), Some(errors)) = (
        kl.uncertainty.mean_kl.clustered_standard_error,
        kl.detail.standard_errors,
    ) {
        writeln!(
            out,
            "standard error: mean {} (by window or stream), {} (positions independent), agreement {:.4}",
            exponent_form(clustered, 1),
            exponent_form(errors.mean_kl, 1),
            errors.top1_agreement
        )?;
    }
    let q = &kl.detail.quantiles;
    if let (Some(median), Some(p90), Some(p99), Some(p999), Some(max)) =
        (q.median_kl, q.p90_kl, q.p99_kl, q.p999_kl, q.max_kl)
    {
        let [median, p90, p99, p999, max] = [median, p90, p99, p999, max].map(|value| exponent_form(value, 2));
        writeln!(
            out,
            "quantiles: median {median}, 90 % {p90}, 99 % {p99}, 99.9 % {p999}, max {max}"
        )?;
    }
    if let Some(reverse) = figures.mean_reverse_kl {
        writeln!(
            out,
            "reverse KL, this run from the reference: mean {}",
            exponent_form(reverse, 4)
        )?;
    }
    if let Some(p) = &kl.detail.delta_p {
        writeln!(
            out,
            "target probability change: mean {:+.4} %, RMS {:.4} %, 1 % {:+.3} %, 5 % {:+.3} %, 95 % {:+.3} %, 99 % {:+.3} %",
            p.mean * 100.0,
            p.rms * 100.0,
            p.p01 * 100.0,
            p.p05 * 100.0,
            p.p95 * 100.0,
            p.p99 * 100.0
        )?;
    }
    writeln!(
        out,
        "mean NLL change: {:+.6}, covered mass {:.4}",
        figures.mean_delta_nll, figures.mean_reference_top_mass
    )?;
    writeln!(out, "by context: {}", by_context_line(&kl.detail.by_context))
}

fn row(out: &mut impl Write, name: &str, figures: &Figures) -> io::Result<()> {
    let name = printable(name);
    let show = |value: Option<f64>| value.map_or("n/a".to_owned(), |v| column(v, 15));
    let (mean, perplexity) = (show(figures.mean_nll), show(figures.perplexity));
    writeln!(
        out,
        "{name:<24} {:>15} {mean:>15} {perplexity:>15}",
        figures.scored_tokens
    )
}

fn uncertainty(out: &mut impl Write, report: &Report) -> io::Result<()> {
    let (figures, uncertainty) = (&report.overall.figures, &report.overall.uncertainty);
    let Some(independent) = figures.standard_error_perplexity else {
        return Ok(());
    };
    write!(
        out,
        "ppl standard error: {} (tokens independent)",
        significant(independent, 3)
    )?;
    if let (Some(error), Some(perplexity)) = (uncertainty.clustered_standard_error, figures.perplexity) {
        let clusters = match uncertainty.clusters {
            ClusterKind::Streams => "streams",
            ClusterKind::Windows => "windows of one stream",
        };
        let error = significant(error * perplexity, 3);
        write!(out, ", {error} ({} {clusters})", uncertainty.cluster_count)?;
    }
    if let Some([low, high]) = report.overall.perplexity_interval_95 {
        write!(
            out,
            "; 95 % interval {} to {} (windows resampled)",
            significant(low, 6),
            significant(high, 6)
        )?;
    }
    writeln!(out)
}
