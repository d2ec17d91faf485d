//! How far a token-weighted mean `D = Σ t_w / Σ n_w` over windows may be off.
//!
//! Tokens of a window and windows of a stream depend on one another, so the standard error over independent tokens is too
//! small. Two estimates that respect this:
//!
//! - clustered: `SE² = S/(S-1) · Σ_s (t_s - n_s D)² / (Σ n)²` over `S` clusters, the streams; with a single stream the
//!   windows are the clusters and the estimate says so;
//! - bootstrap: whole windows are drawn with replacement from a generator of fixed seed, so equal inputs give equal bits.

use serde::{Deserialize, Serialize};

/// Bootstrap resamples: enough for a two-digit standard error and a 95 % interval.
pub const RESAMPLES: usize = 1000;
/// Seed of the bootstrap, recorded in the report.
pub const SEED: u64 = 0x5eed_0001;
/// Draws above this are spread over fewer resamples, so that a stride of 1 does not take minutes.
const MAX_DRAWS: usize = 200_000_000;
/// A standard error from fewer resamples says little.
const MIN_RESAMPLES: usize = 100;

/// Tokens and summed value of one window or cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Block {
    /// Tokens.
    pub count: u64,
    /// Sum of the per-token value over them.
    pub total: f64,
}

/// What the clusters of an estimate are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClusterKind {
    /// The streams of the corpus.
    Streams,
    /// The windows of the only stream.
    Windows,
}

/// Uncertainty of a token-weighted mean.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Uncertainty {
    /// What was clustered.
    pub clusters: ClusterKind,
    /// Number of clusters with tokens.
    pub cluster_count: u64,
    /// Cluster standard error; `None` below two clusters.
    pub clustered_standard_error: Option<f64>,
    /// Standard deviation of the resampled means; `None` below two windows.
    pub bootstrap_standard_error: Option<f64>,
    /// 2.5 % and 97.5 % points of the resampled means.
    pub bootstrap_interval_95: Option<[f64; 2]>,
    /// Resamples drawn.
    pub bootstrap_resamples: u64,
    /// Seed of the generator.
    pub bootstrap_seed: u64,
}

impl Uncertainty {
    /// From the windows of every stream. Empty windows and streams are left out.
    pub fn of(streams: &[Vec<Block>]) -> Self {
        let windows: Vec<Block> = streams.iter().flatten().copied().filter(|b| b.count > 0).collect();
        let by_stream: Vec<Block> = streams.iter().map(|s| sum(s)).filter(|b| b.count > 0).collect();
        let (clusters, blocks) = match by_stream.len() {
            0 | 1 => (ClusterKind::Windows, &windows),
            _ => (ClusterKind::Streams, &by_stream),
        };
        let resamples = (MAX_DRAWS / windows.len().max(1)).clamp(MIN_RESAMPLES, RESAMPLES);
        let mut means = bootstrap_means(&windows, resamples, SEED);
        means.sort_by(f64::total_cmp);
        Self {
            clusters,
            cluster_count: blocks.len() as u64,
            clustered_standard_error: clustered_standard_error(blocks),
            bootstrap_standard_error: standard_deviation(&means),
            bootstrap_interval_95: (!means.is_empty()).then(|| [quantile(&means, 0.025), quantile(&means, 0.975)]),
            bootstrap_resamples: means.len() as u64,
            bootstrap_seed: SEED,
        }
    }
}

fn sum(blocks: &[Block]) -> Block {
    blocks.iter().fold(Block::default(), |a, b| Block {
        count: a.count + b.count,
        total: a.total + b.total,
    })
}

/// `sqrt(S/(S-1) · Σ (t - n D)²) / Σ n`; `None` below two blocks.
pub fn clustered_standard_error(blocks: &[Block]) -> Option<f64> {
    let Block { count, total } = sum(blocks);
    if blocks.len() < 2 || count == 0 {
        return None;
    }
    let mean = total / count as f64;
    let squares: f64 = blocks.iter().map(|b| (b.total - b.count as f64 * mean).powi(2)).sum();
    let s = blocks.len() as f64;
    Some((s / (s - 1.0) * squares).sqrt() / count as f64)
}

/// The clustered standard error of a growing set of blocks, in constant memory: `Σ (t - n D)²` expanded.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RunningError {
    blocks: u64,
    count: f64,
    total: f64,
    total_squares: f64,
    products: f64,
    count_squares: f64,
}

impl RunningError {
    /// Adds a block.
    pub fn add(&mut self, block: Block) {
        let n = block.count as f64;
        self.blocks += 1;
        self.count += n;
        self.total += block.total;
        self.total_squares += block.total * block.total;
        self.products += block.total * n;
        self.count_squares += n * n;
    }

    /// The standard error of the mean so far; `None` below two blocks.
    pub fn standard_error(&self) -> Option<f64> {
        if self.blocks < 2 || self.count == 0.0 {
            return None;
        }
        let mean = self.total / self.count;
        // Equal blocks cancel to a rounding error, which may be negative.
        let squares = (self.total_squares - 2.0 * mean * self.products + mean * mean * self.count_squares).max(0.0);
        let s = self.blocks as f64;
        Some((s / (s - 1.0) * squares).sqrt() / self.count)
    }
}

/// Means of `resamples` draws of as many blocks as there are, with replacement; empty below two blocks.
fn bootstrap_means(blocks: &[Block], resamples: usize, seed: u64) -> Vec<f64> {
    if blocks.len() < 2 {
        return Vec::new();
    }
    let mut random = SplitMix64(seed);
    (0..resamples)
        .map(|_| {
            let drawn = (0..blocks.len()).fold(Block::default(), |a, _| {
                let b = blocks[random.below(blocks.len())];
                Block {
                    count: a.count + b.count,
                    total: a.total + b.total,
                }
            });
            drawn.total / drawn.count as f64
        })
        .collect()
}

fn standard_deviation(values: &[f64]) -> Option<f64> {
    if values.len() < 2 {
        return None;
    }
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    Some((values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt())
}

/// Element `⌊q · (n - 1)⌋` of ascending values: the lower element, no interpolation.
///
/// # Panics
/// When `ascending` is empty.
pub fn quantile(ascending: &[f64], q: f64) -> f64 {
    ascending[(q * (ascending.len() - 1) as f64) as usize]
}

/// Steele, Lea, Flood: "Fast splittable pseudorandom number generators" (2014).
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..bound`; the bias of at most `bound / 2^64` is far below what a resample resolves.
    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(count: u64, total: f64) -> Block {
        Block { count, total }
    }

    #[test]
    fn clustered_error_by_hand() {
        // D = 10/4 = 2.5; deviations 2 - 2·2.5 = -3 and 8 - 2·2.5 = 3; SE² = 2/1 · 18 / 16 = 2.25.
        assert_eq!(clustered_standard_error(&[block(2, 2.0), block(2, 8.0)]), Some(1.5));
        assert_eq!(clustered_standard_error(&[block(2, 2.0)]), None);
        // One cluster per token is the ordinary standard error: s² = 1.541667, n = 4.
        let tokens = [0.5, 1.25, 3.0, 0.25].map(|nll| block(1, nll));
        assert!((clustered_standard_error(&tokens).unwrap() - 0.620_819).abs() < 1e-6);
    }

    #[test]
    fn the_running_error_is_the_clustered_one() {
        let mut running = RunningError::default();
        let blocks: Vec<Block> = (0..50).map(|i| block(5 + i % 3, (i * i % 17) as f64)).collect();
        assert_eq!(running.standard_error(), None);
        for (i, &b) in blocks.iter().enumerate() {
            running.add(b);
            let expected = clustered_standard_error(&blocks[..=i]);
            match (running.standard_error(), expected) {
                (Some(a), Some(b)) => assert!((a - b).abs() < 1e-12),
                (a, b) => assert_eq!(a, b),
            }
        }
    }

    #[test]
    fn a_single_stream_is_clustered_by_window() {
        let one = vec![vec![block(2, 2.0), block(2, 8.0)]];
        let uncertainty = Uncertainty::of(&one);
        assert_eq!(
            (uncertainty.clusters, uncertainty.cluster_count),
            (ClusterKind::Windows, 2)
        );
        assert_eq!(uncertainty.clustered_standard_error, Some(1.5));
        let two = vec![one[0].clone(), vec![block(4, 10.0)], vec![]];
        let uncertainty = Uncertainty::of(&two);
        assert_eq!(
            (uncertainty.clusters, uncertainty.cluster_count),
            (ClusterKind::Streams, 2)
        );
        // Both streams have mean 2.5.
        assert_eq!(uncertainty.clustered_standard_error, Some(0.0));
    }

    #[test]
    fn the_bootstrap_repeats_itself_and_agrees_with_theory() {
        // 400 equal windows of alternating mean 0 and 1: SE = 0.5 / √400 = 0.025.
        let windows: Vec<Block> = (0..400).map(|i| block(10, f64::from(i % 2) * 10.0)).collect();
        let a = Uncertainty::of(std::slice::from_ref(&windows));
        assert_eq!(a, Uncertainty::of(&[windows]));
        assert!((a.bootstrap_standard_error.unwrap() - 0.025).abs() < 0.003, "{a:?}");
        let [low, high] = a.bootstrap_interval_95.unwrap();
        assert!((low - 0.451).abs() < 0.01 && (high - 0.549).abs() < 0.01, "{a:?}");
        let single = Uncertainty::of(&[vec![block(3, 1.0)]]);
        assert_eq!((single.bootstrap_standard_error, single.bootstrap_resamples), (None, 0));
    }

    #[test]
    fn splitmix_matches_its_published_sequence() {
        let mut random = SplitMix64(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn quantiles_take_the_lower_element() {
        let values: Vec<f64> = (0..10).map(f64::from).collect();
        assert_eq!(
            [0.0, 0.5, 0.9, 0.99, 1.0].map(|q| quantile(&values, q)),
            [0.0, 4.0, 8.0, 8.0, 9.0]
        );
    }
}
