//! Trains a `vq2` codebook: 512 patterns of 8 magnitudes for Gaussian words with even-parity signs.
//!
//! `cargo run --release --example train_vq2_codebook -p perplexity-kv -- [SEED] [WORDS] [ITERATIONS] [OUTPUT]`
//!
//! ```text
//! words      WORDS x 8 standard normals; patterns start as the magnitudes of 512 more
//! assign     argmin over p of |P|^2 - 2 sum_j |y_j| P_j + (odd number of negatives ? 4 min_j |y_j| P_j : 0)
//! update     mean of the magnitudes seen: |y|, but minus |y_j| at the flipped coordinate of an odd word;
//!            an empty pattern becomes the magnitudes of a random word
//! finally    times 16, rounded half to even, sorted by squared norm and then lexicographically
//! ```
//!
//! The same seed gives the same bytes on every machine and thread count. The shipped table was trained by this rule (600,000
//! words, 80 iterations) from another generator's draws; its distortion is printed beside the new one.

use perplexity_kv::codecs::vq2::{CODEBOOK, LEVEL_UNIT, PATTERNS, WORD};
use perplexity_kv::conformance::Random;
use rayon::prelude::*;

type Pattern = [f32; WORD];

/// Words per unit of parallel work; sums are added in the order of these parts.
const PART: usize = 4096;

/// A trained table and the mean squared error per coordinate of its real-valued form.
pub struct Trained {
    /// Pattern-major INT8 levels.
    pub bytes: Vec<i8>,
    /// Mean squared error per coordinate before rounding.
    pub distortion: f64,
    /// Mean squared error after each assignment.
    pub history: Vec<f64>,
}

/// Runs the recipe.
pub fn train(seed: u64, words: usize, iterations: usize) -> Trained {
    let mut random = Random(seed);
    let data: Vec<Pattern> = (0..words).map(|_| std::array::from_fn(|_| random.normal())).collect();
    let mut patterns: Vec<Pattern> = (0..PATTERNS)
        .map(|_| std::array::from_fn(|_| random.normal().abs()))
        .collect();
    let mut history = Vec::new();
    for _ in 0..iterations {
        let (sums, counts, error) = assign_all(&data, &patterns);
        history.push(error / (words * WORD) as f64);
        for (pattern, (sum, count)) in patterns.iter_mut().zip(sums.iter().zip(&counts)) {
            let refill = data[random.bits() as usize % words];
            *pattern = match count {
                0 => refill.map(f32::abs),
                count => sum.map(|sum| (sum / *count as f64) as f32),
            };
        }
    }
    let distortion = assign_all(&data, &patterns).2 / (words * WORD) as f64;
    let mut rounded: Vec<[i8; WORD]> = patterns
        .iter()
        .map(|p| p.map(|level| (level * LEVEL_UNIT).round_ties_even() as i8))
        .collect();
    rounded.sort_by_key(|p| (p.iter().map(|level| i32::from(*level).pow(2)).sum::<i32>(), *p));
    Trained {
        bytes: rounded.concat(),
        distortion,
        history,
    }
}

type Assigned = (Vec<[f64; WORD]>, Vec<usize>, f64);

/// Sums of seen magnitudes and counts per pattern, and the total squared error.
fn assign_all(data: &[Pattern], patterns: &[Pattern]) -> Assigned {
    let by_coordinate: Vec<Vec<f32>> = (0..WORD).map(|j| patterns.iter().map(|p| p[j]).collect()).collect();
    let norms: Vec<f32> = patterns
        .iter()
        .map(|p| p.iter().map(|level| level * level).sum())
        .collect();
    let parts: Vec<Assigned> = data
        .par_chunks(PART)
        .map(|words| {
            let mut part = (vec![[0.0; WORD]; patterns.len()], vec![0; patterns.len()], 0.0);
            for y in words {
                let a = y.map(f32::abs);
                let odd = y.iter().filter(|value| **value < 0.0).count() % 2 == 1;
                let (pattern, distance) = nearest(&a, odd, &by_coordinate, &norms);
                let mut seen = a;
                if odd {
                    let cost = |j: usize| a[j] * patterns[pattern][j];
                    let flipped = (1..WORD).fold(0, |best, j| if cost(j) < cost(best) { j } else { best });
                    seen[flipped] = -a[flipped];
                }
                part.0[pattern]
                    .iter_mut()
                    .zip(seen)
                    .for_each(|(sum, seen)| *sum += f64::from(seen));
                part.1[pattern] += 1;
                part.2 += f64::from(distance) + a.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>();
            }
            part
        })
        .collect();
    let empty = (vec![[0.0; WORD]; patterns.len()], vec![0; patterns.len()], 0.0);
    parts.into_iter().fold(empty, |mut total, part| {
        for p in 0..patterns.len() {
            total.0[p]
                .iter_mut()
                .zip(part.0[p])
                .for_each(|(total, part)| *total += part);
            total.1[p] += part.1[p];
        }
        total.2 += part.2;
        total
    })
}

/// Pattern of the smallest distance up to `|a|^2`, and that distance.
fn nearest(a: &Pattern, odd: bool, by_coordinate: &[Vec<f32>], norms: &[f32]) -> (usize, f32) {
    const LANES: usize = 16;
    let penalty = if odd { 4.0 } else { 0.0 };
    let mut best = (0, f32::INFINITY);
    for first in (0..norms.len()).step_by(LANES) {
        let (mut dot, mut smallest) = ([0f32; LANES], [f32::INFINITY; LANES]);
        for (value, levels) in a.iter().zip(by_coordinate) {
            let levels: &[f32; LANES] = levels[first..first + LANES].try_into().expect("whole lanes");
            for l in 0..LANES {
                let t = value * levels[l];
                dot[l] += t;
                smallest[l] = if t < smallest[l] { t } else { smallest[l] };
            }
        }
        for l in 0..LANES {
            let distance = norms[first + l] - 2.0 * dot[l] + penalty * smallest[l];
            if distance < best.1 {
                best = (first + l, distance);
            }
        }
    }
    best
}

/// Mean squared error per coordinate of a table of INT8 levels on fresh Gaussian words.
pub fn table_distortion(levels: &[i8], seed: u64, words: usize) -> f64 {
    let mut random = Random(seed);
    let data: Vec<Pattern> = (0..words).map(|_| std::array::from_fn(|_| random.normal())).collect();
    let patterns: Vec<Pattern> = levels
        .chunks_exact(WORD)
        .map(|p| std::array::from_fn(|j| f32::from(p[j]) / LEVEL_UNIT))
        .collect();
    assign_all(&data, &patterns).2 / (words * WORD) as f64
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| arguments.get(at).map_or(Ok(default), |text| text.parse::<u64>());
    let (seed, words, iterations) = (number(0, 1)?, number(1, 600_000)? as usize, number(2, 80)? as usize);
    if words == 0 {
        return Err("WORDS must be at least 1".into());
    }
    let trained = train(seed, words, iterations);
    println!("seed {seed}, {words} words, {iterations} iterations");
    println!(
        "mean squared error per coordinate before rounding: {:.5}",
        trained.distortion
    );
    let shipped: Vec<i8> = CODEBOOK.iter().map(|byte| *byte as i8).collect();
    for (name, table) in [("this table", &trained.bytes), ("the shipped table", &shipped)] {
        println!(
            "on 200,000 fresh words, {name}: {:.5}",
            table_distortion(table, seed ^ 0xFFFF, 200_000)
        );
    }
    if let Some(path) = arguments.get(3) {
        std::fs::write(
            path,
            trained.bytes.iter().map(|level| *level as u8).collect::<Vec<u8>>(),
        )?;
        println!("written to {path}");
    }
    Ok(())
}
