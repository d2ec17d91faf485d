//! Error of every coder on random rows, beside published measurements.
//!
//! `cargo run --release --example codec_error_table -p perplexity-kv`
//!
//! Rows are bf16-rounded Gaussian (4,096, for the codebook codec 1,024); "rel" is `sqrt(sum e^2 / sum x^2)`, "worst" the
//! largest relative error of a row, "cos" the mean cosine, "max" the largest `|e|` relative to the row's largest value.
//! The second table has outlier channels, the third the error of attention outputs over 2,048 keys with scores of
//! standard deviation 1 and 3, the fourth what the kernels' query and probability forms add.

use perplexity_kv::attention::{EightBitPv, Emulation, KernelOptions, QForm, attend, query_form};
use perplexity_kv::basis::Basis;
use perplexity_kv::codec::HostCodec;
use perplexity_kv::codecs::int8::{int4, int8};
use perplexity_kv::codecs::{fp8::Fp8, k4v2, nvfp4, rk2v4_e8::E8Root, rk4v4, rk4v4_e8::E8Snap, vq2};
use perplexity_kv::conformance::{Random, gaussian, round_trip_error};
use perplexity_kv::registry::KvPair;
use perplexity_kv::store::LayerStore;

/// One measured number beside its published value.
pub struct Entry {
    /// What was measured.
    pub name: String,
    /// Which figure.
    pub figure: &'static str,
    /// Ours.
    pub measured: f64,
    /// Theirs.
    pub published: f64,
    /// Largest accepted relative difference.
    pub tolerance: f64,
}

impl Entry {
    /// Whether the figure is within its tolerance; an absolute 5e-5 allows for the digits printed.
    pub fn agrees(&self) -> bool {
        (self.measured - self.published).abs() <= self.tolerance * self.published + 5e-5
    }
}

const H256: Basis = Basis::Hadamard256;
const H64: Basis = Basis::Hadamard64;
const PLAIN: Basis = Basis::Identity;
const DIM: usize = 256;

/// Extremes over a few thousand rows move with the draw.
const EXTREME: f64 = 0.20;

/// Gaussian rows.
pub fn gaussian_table() -> Vec<Entry> {
    type Case = (&'static str, Box<dyn HostCodec>, [f64; 4]);
    let snap = |bits, max| Box::new(E8Snap { basis: H256, bits, max });
    let cases: [Case; 17] = [
        ("int8 K", Box::new(int8(H256)), [0.0059, 0.0077, 0.99998, 0.0115]),
        ("int8 V", Box::new(int8(PLAIN)), [0.0059, 0.0082, 0.99998, 0.0039]),
        (
            "fp8 K",
            Box::new(Fp8 { basis: H256 }),
            [0.0261, 0.0308, 0.99966, 0.0472],
        ),
        (
            "fp8 V",
            Box::new(Fp8 { basis: PLAIN }),
            [0.0261, 0.0306, 0.99966, 0.0357],
        ),
        ("nvfp4", Box::new(nvfp4::SEARCHED), [0.0848, 0.0974, 0.99642, 0.176]),
        (
            "nvfp4@single",
            Box::new(nvfp4::SINGLE),
            [0.0953, 0.1111, 0.99550, 0.175],
        ),
        ("k4v2 K", Box::new(k4v2::Lloyd4Row), [0.0967, 0.192, 0.99536, 0.196]),
        ("vq2", Box::new(vq2::Vq2), [0.3127, 0.347, 0.95444, 0.532]),
        ("rk*@b V", Box::new(int4(PLAIN, 32)), [0.0970, 0.1176, 0.99535, 0.0714]),
        ("rk*@a V", Box::new(int4(H64, 64)), [0.1076, 0.1456, 0.99428, 0.299]),
        ("rk4v4@c", Box::new(rk4v4::MidRise4), [0.1005, 0.1322, 0.99501, 0.222]),
        ("rk4v4@b K", Box::new(rk4v4::Lloyd4), [0.0940, 0.1517, 0.99557, 0.185]),
        ("rk4v4-e8 K", snap(4, 7.0), [0.1638, 0.2229, 0.98685, 0.312]),
        ("rk6v4-e8 K", snap(6, 31.0), [0.0372, 0.0541, 0.99931, 0.074]),
        (
            "rk2v4-e8@b K",
            Box::new(E8Root { basis: H256 }),
            [0.475, 0.544, 0.8915, 0.87],
        ),
        (
            "rk2v4-e8@a K",
            Box::new(E8Root { basis: H64 }),
            [0.475, 0.544, 0.8915, 0.87],
        ),
        ("int8@plain K", Box::new(int8(PLAIN)), [0.0059, 0.0082, 0.99998, 0.0039]),
    ];
    cases
        .into_iter()
        .enumerate()
        .flat_map(|(seed, (name, codec, [rel, worst, cos, max]))| {
            let (rows, tolerance) = if name == "vq2" { (1024, 0.02) } else { (4096, 0.03) };
            let error = round_trip_error(&*codec, &gaussian(seed as u64 + 1, rows * DIM), DIM);
            let entry = |figure, measured, published, tolerance| Entry {
                name: name.into(),
                figure,
                measured,
                published,
                tolerance,
            };
            [
                entry("rel", error.relative, rel, tolerance),
                entry("worst", error.worst, worst, EXTREME),
                // 1 - cos is about rel^2 / 2: twice the tolerance of rel.
                entry("1 - cos", 1.0 - error.cosine, 1.0 - cos, 2.0 * tolerance),
                entry("max", error.max, max, EXTREME),
            ]
        })
        .collect()
}

/// Gaussian rows with five channels scaled by 8 to 25, two of them with a constant offset. The published rows are
/// described in these words only: channels and offsets are ours, one draw of several whose figures come near.
fn outlier_rows(rows: usize) -> Vec<f32> {
    const CHANNELS: [(usize, f32, f32); 5] = [
        (19, 23.0, 0.0),
        (23, 14.0, 0.0),
        (31, 10.0, 0.0),
        (143, 21.0, -30.0),
        (240, 10.0, -24.0),
    ];
    let mut random = Random(77);
    let mut out: Vec<f32> = (0..rows * DIM).map(|_| random.normal()).collect();
    for row in out.chunks_exact_mut(DIM) {
        for (channel, scale, offset) in CHANNELS {
            row[channel] = row[channel] * scale + offset;
        }
    }
    out.iter().map(|value| half::bf16::from_f32(*value).to_f32()).collect()
}

/// Rows with outlier channels.
pub fn outlier_table() -> Vec<Entry> {
    let cases: [(&str, Box<dyn HostCodec>, f64); 11] = [
        ("int8 K", Box::new(int8(H256)), 0.0047),
        ("int8 V", Box::new(int8(PLAIN)), 0.0169),
        ("nvfp4", Box::new(nvfp4::SEARCHED), 0.0847),
        ("nvfp4@single", Box::new(nvfp4::SINGLE), 0.1009),
        ("fp8 K", Box::new(Fp8 { basis: H256 }), 0.0266),
        ("fp8 V", Box::new(Fp8 { basis: PLAIN }), 0.0170),
        ("rk*@b V", Box::new(int4(PLAIN, 32)), 0.1475),
        ("rk*@a V", Box::new(int4(H64, 64)), 0.066),
        ("vq2", Box::new(vq2::Vq2), 0.298),
        ("rk2v4-e8@a K", Box::new(E8Root { basis: H64 }), 0.280),
        ("rk2v4-e8@b K", Box::new(E8Root { basis: H256 }), 0.437),
    ];
    let measure = |(name, codec, published): (&str, Box<dyn HostCodec>, f64)| {
        let rows = outlier_rows(if name == "vq2" { 1024 } else { 4096 });
        let measured = round_trip_error(&*codec, &rows, DIM).relative;
        Entry {
            name: name.into(),
            figure: "rel",
            measured,
            published,
            tolerance: 0.05,
        }
    };
    cases.into_iter().map(measure).collect()
}

/// Keys of the attention tables.
const KEYS: usize = 2048;
/// Query heads that share the one KV head.
const QUERIES: usize = 64;

/// Relative L2 difference of the outputs of the last token, whose queries see all keys.
fn output_error(a: &[f32], b: &[f32]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let error = square(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b)));
    (error / square(&mut b.iter().map(|b| f64::from(*b)))).sqrt()
}

struct Attention {
    k: Vec<f32>,
    v: Vec<f32>,
    /// Scores have the standard deviation of the queries.
    q: Vec<f32>,
}

impl Attention {
    fn new(seed: u64, deviation: f32) -> Self {
        let q = gaussian(seed + 2, QUERIES * DIM)
            .iter()
            .map(|q| q * deviation)
            .collect();
        Self {
            k: gaussian(seed, KEYS * DIM),
            v: gaussian(seed + 1, KEYS * DIM),
            q,
        }
    }

    fn output(&self, pair: &KvPair, emulation: Emulation) -> Vec<f32> {
        let mut store = LayerStore::new(pair, false, 1, DIM);
        store.k.append(&self.k);
        store.v.append(&self.v);
        attend(&store, Some(pair), &self.q, QUERIES, KEYS - 1, None, emulation)
    }
}

/// A pair by its option spelling.
fn pair(name: &str) -> KvPair {
    name.parse().expect("a built-in codec")
}

/// Output error of whole formats.
#[allow(clippy::approx_constant, reason = "measured errors, not constants")]
pub fn attention_table() -> Vec<Entry> {
    let cases = [
        ("int8", [0.006, 0.006, 0.008], [0.013, 0.006, 0.014]),
        ("fp8", [0.026, 0.026, 0.037], [0.059, 0.026, 0.065]),
        ("k8v4", [0.026, 0.083, 0.087], [0.059, 0.085, 0.104]),
        ("nvfp4", [0.086, 0.083, 0.120], [0.174, 0.085, 0.193]),
        ("rk8v4@b", [0.006, 0.096, 0.096], [0.013, 0.097, 0.098]),
        ("rk4v4@b", [0.093, 0.096, 0.134], [0.183, 0.097, 0.208]),
        ("rk4v4@a", [0.107, 0.108, 0.153], [0.241, 0.103, 0.264]),
        ("rk4v4-e8@b", [0.161, 0.096, 0.189], [0.366, 0.097, 0.378]),
        ("k4v2", [0.097, 0.318, 0.334], [0.218, 0.311, 0.377]),
        ("vq2", [0.321, 0.318, 0.460], [0.650, 0.311, 0.736]),
        ("rk2v4-e8@b", [0.473, 0.096, 0.484], [0.909, 0.097, 0.914]),
    ];
    let mut table = Vec::new();
    for (deviation, figures) in [
        (1.0, ["K, sd 1", "V, sd 1", "both, sd 1"]),
        (3.0, ["K, sd 3", "V, sd 3", "both, sd 3"]),
    ] {
        let data = Attention::new(100, deviation);
        let exact = data.output(&pair("bf16"), Emulation::Format);
        for (name, one, three) in cases {
            let published = if deviation == 1.0 { one } else { three };
            let names = [format!("k={name},v=bf16"), format!("k=bf16,v={name}"), name.into()];
            for ((codecs, figure), published) in names.iter().zip(figures).zip(published) {
                let measured = output_error(&data.output(&pair(codecs), Emulation::Format), &exact);
                // The published figures come from another draw of keys and queries. At deviation 3 a handful of keys
                // carries an output: five draws of ours spread over 0.29 to 0.37 for `rk4v4-e8` keys.
                let tolerance = if deviation == 1.0 { 0.12 } else { 0.25 };
                table.push(Entry {
                    name: name.into(),
                    figure,
                    measured,
                    published,
                    tolerance,
                });
            }
        }
    }
    table
}

/// What the kernels' query and probability forms add to exact attention on the same decoded rows.
pub fn kernel_table() -> Vec<Entry> {
    let on = Emulation::Kernel(KernelOptions {
        eight_bit_pv: EightBitPv::On,
        ..KernelOptions::default()
    });
    let off = Emulation::Kernel(KernelOptions {
        eight_bit_pv: EightBitPv::Off,
        ..KernelOptions::default()
    });
    let mut table = Vec::new();
    for (deviation, column) in [(1.0, 0), (3.0, 1)] {
        let figure = ["sd 1", "sd 3"][column];
        let data = Attention::new(200, deviation);
        let mut push = |name: &str, measured: f64, published: [f64; 2]| {
            let entry = Entry {
                name: name.into(),
                figure,
                measured,
                published: published[column],
                tolerance: 0.15,
            };
            table.push(entry);
        };
        // Query forms on exact keys: the form is applied to the rotated query and rotated back.
        for (name, form, published) in [
            ("INT8 query", QForm::Int8, [0.0058, 0.0125]),
            ("E4M3 query", QForm::E4m3, [0.0262, 0.0593]),
            ("two-term NVFP4 query", QForm::TwoTermNvfp4, [0.0085, 0.0211]),
        ] {
            let exact = data.output(&pair("bf16"), Emulation::Format);
            let mut q = data.q.clone();
            H256.forward(&mut q, DIM);
            q.chunks_exact_mut(DIM).for_each(|row| query_form(form, row));
            H256.inverse(&mut q, DIM);
            let formed = Attention {
                q,
                k: data.k.clone(),
                v: data.v.clone(),
            };
            push(
                name,
                output_error(&formed.output(&pair("bf16"), Emulation::Format), &exact),
                published,
            );
        }
        // FP16 sums of 64 keys, as the fast INT8 kernel's.
        let values = pair("k=bf16,v=int8");
        let exact = data.output(&values, Emulation::Format);
        push(
            "FP16 P, FP16 sums in a tile",
            output_error(&data.output(&values, off), &exact),
            [0.0004, 0.0004],
        );
        // Probability forms behind an exact query.
        for (name, v, emulation, published) in [
            ("u8 P on INT8 V", "int8", on, [0.0062, 0.0045]),
            ("E4M3 P and V on NVFP4 V", "nvfp4", on, [0.0279, 0.0182]),
        ] {
            // k8v4 keys are the ones with an E4M3 probability form; their query form is switched off by comparing with
            // FP16 probabilities under the same query.
            let k = if v == "nvfp4" { "k8v4" } else { "bf16" };
            let codecs = pair(&format!("k={k},v={v}"));
            push(
                name,
                output_error(&data.output(&codecs, emulation), &data.output(&codecs, off)),
                published,
            );
        }
    }
    table
}

fn print(title: &str, table: &[Entry]) {
    println!(
        "\n{title}\n{:<26} {:<12} {:>10} {:>10} {:>8}",
        "", "", "measured", "published", ""
    );
    for entry in table {
        let verdict = if entry.agrees() { "" } else { "differs" };
        println!(
            "{:<26} {:<12} {:>10.5} {:>10.5} {:>8}",
            entry.name, entry.figure, entry.measured, entry.published, verdict
        );
    }
}

fn main() {
    print("Gaussian rows", &gaussian_table());
    print("Rows with outlier channels", &outlier_table());
    print("Attention output, 2,048 keys, window off", &attention_table());
    print("Kernel forms against exact attention on the same rows", &kernel_table());
}
