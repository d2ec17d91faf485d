//! Log lines about an evaluation, as text; where and when they appear is the program's business.

use crate::corpus::CorpusPlan;
use crate::evaluate::{Results, Snapshot, StreamResult, Totals};
use crate::humanize::{count, duration, exponent_form, rate, significant};
use crate::statistics::by_context_line;

/// `corpus ready | 4 streams | 258,529 input tokens | 258,525 scored tokens | 125 windows | 812 ms`
pub fn corpus_line(plan: &CorpusPlan, seconds: f64) -> String {
    format!(
        "corpus ready | {} streams | {} input tokens | {} scored tokens | {} windows | {}",
        plan.streams.len(),
        count(plan.input_tokens()),
        count(plan.scored_tokens()),
        count(plan.windows()),
        duration(seconds)
    )
}

/// `scoring | 4 streams | 258,525 tokens | 125 windows`
pub fn start_line(totals: Totals) -> String {
    format!(
        "scoring | {} streams | {} tokens | {} windows",
        totals.streams,
        count(totals.tokens),
        totals.windows
    )
}

/// `scoring | 53,247/258,525 tokens | 25/125 windows | PPL 4.9123 ± 0.0310 | 5.32k tok/s | elapsed 10.0s | ETA 38.6s`,
/// the standard error clustered by window, with ` | stream KL 2.630e-02` before the rate while comparing.
pub fn progress_line(snapshot: &Snapshot) -> String {
    let Snapshot {
        totals,
        windows,
        running,
        standard_error,
        stream_kl,
        elapsed,
    } = snapshot;
    let kl = stream_kl.map_or(String::new(), |kl| format!(" | stream KL {}", exponent_form(kl, 3)));
    format!(
        "scoring | {}/{} tokens | {windows}/{} windows | PPL {}{kl} | {} | elapsed {} | ETA {}",
        count(running.scored_tokens),
        count(totals.tokens),
        totals.windows,
        running.perplexity().map_or("n/a".into(), |p| match standard_error {
            Some(error) => format!("{p:.4} ± {:.4}", p * error),
            None => format!("{p:.4}"),
        }),
        rate(running.scored_tokens as f64 / elapsed, "tok"),
        duration(*elapsed),
        eta(snapshot).map_or("n/a".into(), duration),
    )
}

/// Remaining scored tokens over the average rate, in seconds; `None` before the first token.
pub fn eta(snapshot: &Snapshot) -> Option<f64> {
    let done = snapshot.running.scored_tokens;
    let remaining = snapshot.totals.tokens.saturating_sub(done);
    (done > 0).then(|| remaining as f64 * snapshot.elapsed / done as f64)
}

/// `[1/4] wikitext-00`
pub fn stream_begin_line(plan: &CorpusPlan, stream: usize) -> String {
    format!("[{}/{}] {}", stream + 1, plan.streams.len(), plan.streams[stream].id)
}

/// `[1/4] wikitext-00 | 65,102 scored tokens | PPL 5.20698 | 12.3s`
pub fn stream_line(plan: &CorpusPlan, stream: usize, result: &StreamResult) -> String {
    format!(
        "{} | {} scored tokens | PPL {} | {}",
        stream_begin_line(plan, stream),
        count(result.aggregate.scored_tokens),
        perplexity(result.aggregate.perplexity()),
        duration(result.seconds)
    )
}

/// `[1/4] wikitext-00 | KL 2.6300e-02 | top-1 agreement 0.9612 | by context 0-1K 2.41e-02 1K-2K 2.55e-02`, when comparing.
pub fn stream_kl_line(plan: &CorpusPlan, stream: usize, result: &StreamResult) -> Option<String> {
    result.kl.as_ref().map(|kl| {
        format!(
            "{} | KL {} | top-1 agreement {:.4} | by context {}",
            stream_begin_line(plan, stream),
            exponent_form(kl.figures.mean_kl, 4),
            kl.figures.top1_agreement,
            by_context_line(&kl.by_context)
        )
    })
}

/// `scoring complete | 258,525 tokens | 125 windows | PPL 4.70134 | 48.6s | 5.32k tok/s`
pub fn complete_line(results: &Results) -> String {
    format!(
        "scoring complete | {} tokens | {} windows | PPL {} | {} | {}",
        count(results.overall.scored_tokens),
        results.streams.iter().map(|s| s.windows.len()).sum::<usize>(),
        perplexity(results.overall.perplexity()),
        duration(results.score_seconds),
        rate(results.overall.scored_tokens as f64 / results.score_seconds, "tok"),
    )
}

fn perplexity(value: Option<f64>) -> String {
    value.map_or("n/a".into(), |p| significant(p, 6))
}

/// `line` cut to the terminal's width less one column; every character counts as one column.
pub fn cut(line: &str, width: usize) -> &str {
    match line.char_indices().nth(width.saturating_sub(1)) {
        Some((end, _)) => &line[..end],
        None => line,
    }
}

/// A bar of `cells` cells such as `[######    ]`; empty without cells.
pub fn bar(fraction: f64, cells: usize) -> String {
    if cells == 0 {
        return String::new();
    }
    // A NaN fraction fills nothing.
    let filled = ((fraction.clamp(0.0, 1.0) * cells as f64) as usize).min(cells);
    format!("[{}{}]", "#".repeat(filled), " ".repeat(cells - filled))
}

/// Cells of the loading bar in a terminal of `width` columns whose other text takes `text` columns: the largest of 20,
/// 16, 12 that fits with its two brackets and a blank, or none.
pub fn bar_cells(width: usize, text: usize) -> usize {
    [20, 16, 12]
        .into_iter()
        .find(|cells| text + cells + 3 < width)
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aggregate::Aggregate;

    fn snapshot() -> Snapshot {
        let total_nll = 53_247.0 * 4.9123f64.ln();
        Snapshot {
            totals: Totals {
                streams: 4,
                tokens: 258_525,
                windows: 125,
            },
            windows: 25,
            running: Aggregate {
                scored_tokens: 53_247,
                total_nll,
                squared_deviations: 0.0,
            },
            standard_error: None,
            stream_kl: None,
            elapsed: 10.0,
        }
    }

    #[test]
    fn the_progress_line() {
        assert_eq!(
            start_line(snapshot().totals),
            "scoring | 4 streams | 258,525 tokens | 125 windows"
        );
        assert_eq!(
            progress_line(&snapshot()),
            "scoring | 53,247/258,525 tokens | 25/125 windows | PPL 4.9123 | 5.32k tok/s | elapsed 10.0s | ETA 38.6s"
        );
        let line = progress_line(&Snapshot {
            stream_kl: Some(0.0263),
            ..snapshot()
        });
        assert!(
            line.contains(" | PPL 4.9123 | stream KL 2.630e-02 | 5.32k tok/s"),
            "{line}"
        );
        let line = progress_line(&Snapshot {
            standard_error: Some(0.01),
            ..snapshot()
        });
        assert!(line.contains(" | PPL 4.9123 ± 0.0491 | 5.32k tok/s"), "{line}");
        let none = Snapshot {
            running: Aggregate::default(),
            elapsed: 0.0,
            ..snapshot()
        };
        assert!(progress_line(&none).ends_with("PPL n/a | n/a | elapsed 0 us | ETA n/a"));
    }

    #[test]
    fn lines_fit_the_terminal() {
        assert_eq!(cut("abcdef", 4), "abc");
        assert_eq!(cut("\u{4e2d}\u{6587}x", 3), "\u{4e2d}\u{6587}");
        assert_eq!(cut("abc", 80), "abc");
        assert_eq!(bar(0.5, 4), "[##  ]");
        assert_eq!(
            (bar(2.0, 2), bar(f64::NAN, 2), bar(0.5, 0)),
            ("[##]".into(), "[  ]".into(), String::new())
        );
        assert_eq!([80, 64, 60, 50].map(|width| bar_cells(width, 44)), [20, 16, 12, 0]);
    }
}
