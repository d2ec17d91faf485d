//! Prints how fast each numeric format is decoded: GB/s of f32 written, on all threads and on one.
//!
//! `cargo run --release -p perplexity-model --example format_throughput [rows] [columns]`

use perplexity_model::formats::nvfp4_expert::{self, MatrixWords, Projection, decode_matrix};
use perplexity_model::formats::{EncodeMethod, Format, FormatError, decode, encode, fp8_block};
use std::time::{Duration, Instant};

/// Shortest time over which a format is measured.
const LEAST: Duration = Duration::from_millis(300);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<u64>());
    let rows = arguments.next().transpose()?.unwrap_or(4096);
    let columns = arguments.next().transpose()?.unwrap_or(5120);
    let shape = [rows, columns];
    let elements = usize::try_from(rows * columns)?;
    // Any spread of values will do; decoding does not branch on them.
    let values: Vec<f32> = (0..elements)
        .map(|at| ((at * 2_654_435_761) % 65_521) as f32 / 65_521.0 - 0.5)
        .collect();
    let single = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    let mut out = vec![0.0; elements];
    println!(
        "{rows} x {columns}, {} threads; GB/s of f32 written",
        rayon::current_num_threads()
    );
    println!("{:<26}{:>12}{:>12}", "format", "all threads", "one thread");
    for format in Format::ALL {
        let bytes = match format {
            Format::Bf16 | Format::Fp32 | Format::Int32 => encode(format, EncodeMethod::CastDirect, &shape, &values)?,
            Format::Nvfp4 => encode(format, EncodeMethod::Nvfp4Absmax, &shape, &values)?,
            Format::Fp8E4m3fnRowBf16 => encode(format, EncodeMethod::Fp8RowMaxabs, &shape, &values)?,
            Format::Fp8E4m3fnBlock128F32 => {
                let tiles = usize::try_from(rows.div_ceil(128) * columns.div_ceil(128))?;
                fp8_block::pack(&shape, &vec![0x3A; elements], &vec![0.5; tiles])?
            }
            Format::Nvfp4Mul => {
                let (codes, scales) = (vec![0x2B; elements / 2], vec![0x3A; elements / 16]);
                let words = MatrixWords {
                    codes: &codes,
                    scales: &scales,
                    multiplier: 0.5,
                };
                nvfp4_expert::pack::<FormatError>(&[1, columns, rows], |_, _| Ok(words))?
            }
            _ => encode(format, EncodeMethod::GroupedAbsmax, &shape, &values)?,
        };
        let mut run = || match format {
            Format::Nvfp4Mul => decode_matrix(&[1, columns, rows], &bytes, 0, Projection::Gate, &mut out),
            _ => decode(format, format.layout(), &shape, 1, &bytes, 0..rows * columns, &mut out),
        };
        let all = throughput(elements, &mut run)?;
        let one = single.install(|| throughput(elements, &mut run))?;
        println!("{:<26}{all:>12.2}{one:>12.2}", format.name());
    }
    Ok(())
}

/// GB/s of the output over repeated runs, after one to warm up.
fn throughput(elements: usize, run: &mut (impl FnMut() -> Result<(), FormatError> + Send)) -> Result<f64, FormatError> {
    run()?;
    let (start, mut runs) = (Instant::now(), 0u32);
    while start.elapsed() < LEAST {
        run()?;
        runs += 1;
    }
    Ok(f64::from(runs) * (elements * size_of::<f32>()) as f64 / start.elapsed().as_secs_f64() / 1e9)
}
