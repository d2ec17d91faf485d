//! Causal grouped-query attention over a packed cache, at two emulation levels.
//!
//! ```text
//! format   s_j = Bk(q) . k_j / sqrt(D),  o = Bv^-1 (sum_j softmax(s)_j v_j)        k_j, v_j: decoded rows; f64 sums
//! kernel   the same with the query and probability forms of the engine's kernels, over tiles of 64 keys from position 0
//! ```
//!
//! `format` isolates what the codec loses and is the default. `kernel` adds what the engine's prompt kernels lose:
//!
//! | cache | query | probabilities and values |
//! |---|---|---|
//! | `bf16` | as is | FP16 p |
//! | `int8`, `rk*` | INT8 per 64, float32 scale | FP16 p, FP16 sums in the fast kernel, or the u8 form with 8-bit P x V |
//! | `fp8` | E4M3 per row, float32 scale | FP16 p and sums |
//! | `k8v4` | as `fp8` | E4M3 form (default), or FP16 p and sums |
//! | `nvfp4` | two NVFP4 terms | E4M3 form (default), or FP16 p and sums |
//! | `nvfp4`, original kernel or up to 768 visible keys | FP16 | FP16 p |
//! | `vq2`, `k4v2` | INT8 per 64 | u8 form for `vq2` (default), FP16 p and sums for `k4v2` |
//!
//! Values are rounded to FP16 in every kernel form. FP16 sums are those of a 64-key tile, rounded after every 16 keys (one
//! matrix instruction); everything else is summed in f64.

use crate::arith::{absmax, rne};
use crate::codec::HostCodec;
use crate::registry::{KvDtype, KvPair, Side};
use crate::store::{LayerStore, ReadRows, SideStore};
use perplexity_kernels::backend::BlockSelection;
use perplexity_kernels::numeric::{e2m1_to_f32, e4m3fn_to_f32, f16_to_f32, f32_to_e2m1, f32_to_e4m3fn, f32_to_f16};
use rayon::prelude::*;

/// Keys per tile of the emulated kernels.
const TILE: usize = 64;
/// Keys that one FP16 matrix instruction sums before its accumulator is rounded.
const INSTRUCTION_KEYS: usize = 16;
/// Visible keys of a launch up to which the original NVFP4 kernel runs.
const FAST_NVFP4_KEYS: usize = 768;

/// What attention imitates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Emulation {
    /// Exact attention on decoded rows.
    #[default]
    Format,
    /// Query and probability forms of the engine's kernels.
    Kernel(KernelOptions),
}

/// Choice of the 8-bit probability form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EightBitPv {
    /// As the engine: on for `k8v4`, the fast `nvfp4` kernel and `vq2`.
    #[default]
    Auto,
    /// On wherever the format has one.
    On,
    /// FP16 probabilities everywhere.
    Off,
}

/// The engine's kernel options.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KernelOptions {
    /// `--use-original-int8-prefill-kernel`.
    pub original_int8: bool,
    /// `--use-original-nvfp4-prefill-kernel`.
    pub original_nvfp4: bool,
    /// `--fast-prefill-kernel` of the `int8` and `rk*` caches.
    pub fast_prefill: bool,
    /// `--prefill-8bit-pv`.
    pub eight_bit_pv: EightBitPv,
}

/// A kernel option that does not fit the cache format.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{option} needs a KV cache of {needs}, got `{got}`")]
pub struct KernelOptionError {
    /// The option.
    pub option: &'static str,
    /// Formats that it applies to.
    pub needs: &'static str,
    /// The cache's format.
    pub got: String,
}

impl KernelOptions {
    /// Checks the options against the default format of a cache.
    ///
    /// # Errors
    /// When an option belongs to another format.
    pub fn check(&self, dtype: &KvDtype) -> Result<(), KernelOptionError> {
        let pair = &dtype.default;
        let base = pair.name.split('@').next().unwrap_or_default();
        let refuse = |wrong: bool, option, needs| {
            if wrong {
                Err(KernelOptionError {
                    option,
                    needs,
                    got: pair.name.clone(),
                })
            } else {
                Ok(())
            }
        };
        refuse(
            self.original_int8 && base != "int8",
            "--use-original-int8-prefill-kernel",
            "int8",
        )?;
        refuse(
            self.original_nvfp4 && base != "nvfp4",
            "--use-original-nvfp4-prefill-kernel",
            "nvfp4",
        )?;
        let integer = base == "int8" || base.starts_with("rk");
        refuse(self.fast_prefill && !integer, "--fast-prefill-kernel", "int8 or rk*")?;
        let has_form = Forms::new(
            pair,
            KernelOptions {
                eight_bit_pv: EightBitPv::On,
                ..*self
            },
            usize::MAX,
        )
        .p
        .is_eight_bit();
        refuse(
            self.eight_bit_pv == EightBitPv::On && !has_form,
            "--prefill-8bit-pv",
            "int8, nvfp4, k8v4, vq2 or k4v2",
        )
    }
}

/// How a kernel holds the query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QForm {
    /// Unchanged.
    AsIs,
    /// INT8 codes, scale `max|q| / 127` per 64 values.
    Int8,
    /// E4M3 codes, scale `max|q| / 448` per row.
    E4m3,
    /// FP16.
    F16,
    /// `f (t1 + t2)`: an NVFP4 row and the NVFP4 row of what it leaves, after scaling to `6 * 448`.
    TwoTermNvfp4,
}

/// How a kernel holds the probabilities of a tile, and with them the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PForm {
    /// FP16 relative to the running maximum; FP16 values.
    F16,
    /// The same, summed in FP16 inside a tile. Values are halved until the tile's largest scale cannot overflow the sum.
    F16Tile,
    /// Eight unsigned bits per tile and 64-value group, the value scale folded in; integer value codes.
    U8,
    /// E4M3 of 256 p relative to the tile's maximum; E4M3 values relative to the tile's largest scale.
    E4m3,
}

impl PForm {
    fn is_eight_bit(self) -> bool {
        matches!(self, Self::U8 | Self::E4m3)
    }
}

#[derive(Debug, Clone, Copy)]
struct Forms {
    q: QForm,
    p: PForm,
}

impl Forms {
    /// Forms of the kernel that reads `pair` in a launch that sees `visible` keys.
    fn new(pair: &KvPair, options: KernelOptions, visible: usize) -> Self {
        let fast_nvfp4 = !options.original_nvfp4 && visible > FAST_NVFP4_KEYS;
        let q = match pair.k {
            Side::Bf16(_) | Side::F16(_) => QForm::AsIs,
            Side::Fp8(_) => QForm::E4m3,
            Side::Nvfp4(_) if fast_nvfp4 => QForm::TwoTermNvfp4,
            Side::Nvfp4(_) => QForm::F16,
            _ => QForm::Int8,
        };
        let wanted = |automatic: bool| match options.eight_bit_pv {
            EightBitPv::Auto => automatic,
            EightBitPv::On => true,
            EightBitPv::Off => false,
        };
        let p = match (pair.k, pair.v) {
            (_, Side::Absmax(codec)) if codec.bits == 8 && wanted(false) => PForm::U8,
            (k, Side::Vq2(_)) if wanted(matches!(k, Side::Vq2(_))) => PForm::U8,
            (Side::Nvfp4(_), Side::Nvfp4(_)) if fast_nvfp4 && wanted(true) => PForm::E4m3,
            (Side::Fp8(_), Side::Nvfp4(_)) if wanted(true) => PForm::E4m3,
            (_, Side::Absmax(codec)) if codec.bits == 8 && !options.original_int8 => PForm::F16Tile,
            (_, Side::Absmax(_)) if options.fast_prefill => PForm::F16Tile,
            (Side::Nvfp4(_), Side::Nvfp4(_)) if fast_nvfp4 => PForm::F16Tile,
            (Side::Fp8(_), Side::Nvfp4(_)) | (_, Side::Fp8(_) | Side::Vq2(_)) => PForm::F16Tile,
            _ => PForm::F16,
        };
        Self { q, p }
    }
}

/// Attention of queries `[tokens, heads, head_dim]` (model basis, positions `first_position..`) over the first
/// `first_position + tokens` rows of a cache; returns outputs of the same shape, not yet rounded.
///
/// `pair` names the cache's codecs for the kernel level; at the format level it is not looked at. With a selection every
/// query reads the keys that it names there, at the format level only: the kernels' tiles are those of dense attention.
///
/// # Panics
/// When the queries do not fit the cache, or on a selection at the kernel level: a programming error.
pub fn attend(
    store: &LayerStore,
    pair: Option<&KvPair>,
    queries: &[f32],
    heads: usize,
    first_position: usize,
    selection: Option<&BlockSelection>,
    emulation: Emulation,
) -> Vec<f32> {
    let (head_dim, kv_heads) = (store.k.head_dim(), store.k.kv_heads());
    let tokens = queries.len() / (heads * head_dim);
    assert!(
        queries.len() == tokens * heads * head_dim && heads.is_multiple_of(kv_heads),
        "whole query rows"
    );
    assert!(
        store.k.tokens() >= first_position + tokens,
        "keys are appended before they are read"
    );
    let mut q = queries.to_vec();
    store.query_basis(&mut q);
    let forms = match (emulation, pair) {
        (Emulation::Kernel(options), Some(pair)) => Some(Forms::new(pair, options, first_position + tokens)),
        _ => None,
    };
    assert!(
        forms.is_none() || selection.is_none(),
        "kernel forms are of dense attention"
    );
    if let Some(forms) = forms {
        q.par_chunks_exact_mut(head_dim)
            .for_each(|row| query_form(forms.q, row));
    }
    let (k, v) = (store.k.read(), store.v.read());
    let tiles = forms
        .filter(|forms| forms.p != PForm::F16)
        .map(|_| ValueScales::new(&store.v, &v, pair.map(|pair| pair.v)));
    let mut out = vec![0.0; q.len()];
    let rows = Rows {
        k: &k,
        v: &v,
        kv_heads,
        head_dim,
    };
    out.par_chunks_exact_mut(head_dim)
        .zip(q.par_chunks_exact(head_dim))
        .enumerate()
        .for_each(|(index, (out, q))| {
            let (position, head) = (first_position + index / heads, index % heads / (heads / kv_heads));
            let keys = keys_of(selection, index / heads, position);
            let scores = rows.scores(q, &keys, position, head);
            match forms.map(|forms| forms.p) {
                None => {
                    let exact = rows.exact_output(&keys, &scores, position, head);
                    out.iter_mut().zip(exact).for_each(|(out, x)| *out = x as f32);
                }
                Some(PForm::F16) => rows.f16_output(&scores, position, head, out),
                Some(form) => {
                    let scales = tiles.as_ref().expect("scales are read for these forms");
                    match form {
                        PForm::U8 => rows.u8_output(&scores, position, head, scales, out),
                        PForm::E4m3 => rows.e4m3_output(&scores, position, head, scales, out),
                        _ => rows.f16_tile_output(&scores, position, head, scales, out),
                    }
                }
            }
        });
    store.output_basis(&mut out);
    out
}

/// [`attend`] at the format level with queries, transforms and sums in f64: nothing is rounded but the stored rows.
///
/// # Panics
/// As [`attend`].
pub fn attend_exact(
    store: &LayerStore,
    queries: &[f32],
    heads: usize,
    first_position: usize,
    selection: Option<&BlockSelection>,
) -> Vec<f64> {
    let (head_dim, kv_heads) = (store.k.head_dim(), store.k.kv_heads());
    assert!(heads.is_multiple_of(kv_heads), "whole groups of query heads");
    let mut q: Vec<f64> = queries.iter().copied().map(f64::from).collect();
    store.k.codec().basis().forward_f64(&mut q, head_dim);
    let rows = Rows {
        k: &store.k.read(),
        v: &store.v.read(),
        kv_heads,
        head_dim,
    };
    let mut out: Vec<f64> = q
        .par_chunks_exact(head_dim)
        .enumerate()
        .flat_map_iter(|(index, q)| {
            let (position, head) = (first_position + index / heads, index % heads / (heads / kv_heads));
            let keys = keys_of(selection, index / heads, position);
            rows.exact_output(&keys, &rows.scores(q, &keys, position, head), position, head)
        })
        .collect();
    store.v.codec().basis().inverse_f64(&mut out, head_dim);
    out
}

/// The keys that query `query` at `position` reads, ascending.
fn keys_of(selection: Option<&BlockSelection>, query: usize, position: usize) -> Vec<usize> {
    match selection {
        Some(selection) => selection.ranges(query, position).flatten().collect(),
        None => (0..=position).collect(),
    }
}

/// Applies a query form to a row in the basis of the keys.
pub fn query_form(form: QForm, q: &mut [f32]) {
    match form {
        QForm::AsIs => {}
        QForm::F16 => q.iter_mut().for_each(|value| *value = f16_to_f32(f32_to_f16(*value))),
        QForm::Int8 => q.chunks_mut(64).for_each(|group| {
            let scale = absmax(group) / 127.0;
            let factor = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            group
                .iter_mut()
                .for_each(|value| *value = rne(*value * factor).clamp(-127.0, 127.0) * scale);
        }),
        QForm::E4m3 => {
            let scale = absmax(q) / 448.0;
            let factor = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            q.iter_mut()
                .for_each(|value| *value = e4m3fn_to_f32(f32_to_e4m3fn(*value * factor)) * scale);
        }
        QForm::TwoTermNvfp4 => {
            // 2688 = 6 * 448: the largest magnitude becomes the largest product of code and scale.
            let largest = absmax(q);
            let up = if largest > 0.0 { 2688.0 / largest } else { 0.0 };
            let x: Vec<f32> = q.iter().map(|value| value * up).collect();
            let first = nvfp4_term(&x);
            let rest: Vec<f32> = x.iter().zip(&first).map(|(x, first)| x - first).collect();
            let second = nvfp4_term(&rest);
            let down = largest / 2688.0;
            q.iter_mut()
                .zip(first.iter().zip(second))
                .for_each(|(q, (first, second))| *q = down * (first + second));
        }
    }
}

/// An NVFP4 row with the single target 6, decoded.
fn nvfp4_term(v: &[f32]) -> Vec<f32> {
    let mut out = Vec::with_capacity(v.len());
    for group in v.chunks(16) {
        let scale = e4m3fn_to_f32(f32_to_e4m3fn((absmax(group) / 6.0).clamp(2f32.powi(-9), 448.0)));
        out.extend(
            group
                .iter()
                .map(|value| e2m1_to_f32(f32_to_e2m1(value / scale)) * scale),
        );
    }
    out
}

/// Scales behind the decoded values, for the forms that work on value codes or on scaled values.
struct ValueScales {
    /// Largest scale whose values need no halving before FP16 sums: what 64 values of the largest code may add up to.
    largest_unshifted: f32,
    /// `[tokens, kv_heads, groups]` of the codes.
    coded: Scales,
    /// The same of exact copies.
    exact: Option<Scales>,
}

struct Scales {
    values: Vec<f32>,
    groups: usize,
}

impl Scales {
    /// The scale of one value of one row.
    fn at(&self, row: usize, dim: usize, head_dim: usize) -> f32 {
        self.values[row * self.groups + dim * self.groups / head_dim]
    }

    /// Scales from the last plane of packed rows: FP16 words or E4M3 bytes.
    fn unpack(codec: &dyn HostCodec, packed: &[u8], head_dim: usize) -> Self {
        let layout = codec.layout(head_dim);
        let plane = *layout.0.last().expect("a plane of scales");
        let mut entries = vec![0; layout.entries()];
        let mut values = Vec::new();
        for row in packed.chunks_exact(layout.bytes()) {
            layout.unpack(row, &mut entries);
            let words = &entries[layout.entries() - plane.count..];
            values.extend(words.iter().map(|word| match plane.bits {
                8 => e4m3fn_to_f32(*word as u8),
                _ => f16_to_f32(*word),
            }));
        }
        Self {
            values,
            groups: plane.count,
        }
    }
}

impl ValueScales {
    fn new(v: &SideStore, read: &ReadRows, side: Option<Side>) -> Self {
        let coded = Scales::unpack(v.codec(), v.packed(), v.head_dim());
        // Exact copies were decoded from INT8; encoding them again gives their scales back (the largest code is +-127).
        let exact = read.exact.as_ref().map(|exact| {
            let copy = exact.window.copy.host();
            let packed = crate::codec::encode_rows(&*copy, &exact.rows, v.kv_heads(), v.head_dim());
            Scales::unpack(&*copy, &packed, v.head_dim())
        });
        let largest_unshifted = match side {
            // E4M3 codes reach 448.
            Some(Side::Fp8(_)) => 2f32.next_down(),
            // E2M1 codes reach 6.
            Some(Side::Nvfp4(_)) => 128.0,
            // Integer codes and levels reach 127: 64 * 127 * 8 is below 65,504.
            _ => 8.0,
        };
        Self {
            largest_unshifted,
            coded,
            exact,
        }
    }

    /// How often the values of a tile are halved for FP16 sums.
    fn shift(&self, rows: &Rows<'_>, keys: std::ops::Range<usize>, query: usize, head: usize) -> i32 {
        let scales = keys.flat_map(|key| {
            let scales = self.of(rows, key, query);
            let row = key * rows.kv_heads + head;
            &scales.values[row * scales.groups..(row + 1) * scales.groups]
        });
        let largest = scales.copied().fold(0f32, f32::max);
        if largest.is_infinite() {
            return 0;
        }
        (0..)
            .find(|shift| largest * 2f32.powi(-shift) <= self.largest_unshifted)
            .unwrap_or(0)
    }

    fn of<'a>(&'a self, rows: &Rows<'_>, key: usize, query: usize) -> &'a Scales {
        match (&self.exact, &rows.v.exact) {
            (Some(scales), Some(exact)) if exact.reads(key, query) => scales,
            _ => &self.coded,
        }
    }
}

struct Rows<'a> {
    k: &'a ReadRows,
    v: &'a ReadRows,
    kv_heads: usize,
    head_dim: usize,
}

impl Rows<'_> {
    fn row<'a>(&self, side: &'a ReadRows, key: usize, query: usize, head: usize) -> &'a [f32] {
        let at = (key * self.kv_heads + head) * self.head_dim;
        let rows = match &side.exact {
            Some(exact) if exact.reads(key, query) => &exact.rows,
            _ => &side.coded,
        };
        &rows[at..at + self.head_dim]
    }

    /// `q . k_j / sqrt(D)` for the given keys.
    fn scores<Q: Copy + Into<f64>>(&self, q: &[Q], keys: &[usize], position: usize, head: usize) -> Vec<f64> {
        let scale = 1.0 / (self.head_dim as f64).sqrt();
        keys.iter()
            .map(|key| dot(q, self.row(self.k, *key, position, head)) * scale)
            .collect()
    }

    fn exact_output(&self, keys: &[usize], scores: &[f64], position: usize, head: usize) -> Vec<f64> {
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut sum = 0.0;
        let mut acc = vec![0f64; self.head_dim];
        for (key, score) in keys.iter().zip(scores) {
            let p = (score - largest).exp();
            sum += p;
            add_scaled(&mut acc, p, self.row(self.v, *key, position, head));
        }
        acc.iter_mut().for_each(|acc| *acc /= sum);
        acc
    }

    fn f16_output(&self, scores: &[f64], position: usize, head: usize, out: &mut [f32]) {
        let (mut running, mut sum) = (f64::NEG_INFINITY, 0.0);
        let mut acc = vec![0f64; self.head_dim];
        for (tile, scores) in scores.chunks(TILE).enumerate() {
            let largest = scores.iter().copied().fold(running, f64::max);
            rescale(&mut acc, &mut sum, (running - largest).exp());
            running = largest;
            for (j, score) in scores.iter().enumerate() {
                let p = (score - running).exp();
                sum += p;
                let p = f64::from(f16_to_f32(f32_to_f16(p as f32)));
                let v = self.row(self.v, tile * TILE + j, position, head);
                acc.iter_mut()
                    .zip(v)
                    .for_each(|(acc, v)| *acc += p * f64::from(f16_to_f32(f32_to_f16(*v))));
            }
        }
        out.iter_mut().zip(acc).for_each(|(out, acc)| *out = (acc / sum) as f32);
    }

    fn f16_tile_output(&self, scores: &[f64], position: usize, head: usize, scales: &ValueScales, out: &mut [f32]) {
        let (mut running, mut sum) = (f64::NEG_INFINITY, 0.0);
        let mut acc = vec![0f64; self.head_dim];
        let mut tile_acc = vec![0f32; self.head_dim];
        for (tile, scores) in scores.chunks(TILE).enumerate() {
            let largest = scores.iter().copied().fold(running, f64::max);
            rescale(&mut acc, &mut sum, (running - largest).exp());
            running = largest;
            let shift = scales.shift(self, tile * TILE..tile * TILE + scores.len(), position, head);
            let (down, up) = (2f32.powi(-shift), 2f64.powi(shift));
            tile_acc.fill(0.0);
            for (step, scores) in scores.chunks(INSTRUCTION_KEYS).enumerate() {
                let mut products = vec![0f64; self.head_dim];
                for (j, score) in scores.iter().enumerate() {
                    let p = (score - running).exp();
                    sum += p;
                    let p = f64::from(f16(p as f32));
                    let key = tile * TILE + step * INSTRUCTION_KEYS + j;
                    let v = self.row(self.v, key, position, head);
                    products
                        .iter_mut()
                        .zip(v)
                        .for_each(|(product, v)| *product += p * f64::from(f16(v * down)));
                }
                tile_acc
                    .iter_mut()
                    .zip(products)
                    .for_each(|(acc, product)| *acc = f16((f64::from(*acc) + product) as f32));
            }
            acc.iter_mut()
                .zip(&tile_acc)
                .for_each(|(acc, tile)| *acc += up * f64::from(*tile));
        }
        out.iter_mut().zip(acc).for_each(|(out, acc)| *out = (acc / sum) as f32);
    }

    fn u8_output(&self, scores: &[f64], position: usize, head: usize, scales: &ValueScales, out: &mut [f32]) {
        const GROUP: usize = 64;
        let (mut running, mut sum) = (f64::NEG_INFINITY, 0.0);
        let mut acc = vec![0f64; self.head_dim];
        for (tile, scores) in scores.chunks(TILE).enumerate() {
            let largest = scores.iter().copied().fold(running, f64::max);
            rescale(&mut acc, &mut sum, (running - largest).exp());
            running = largest;
            let p: Vec<f32> = scores.iter().map(|score| (score - running).exp() as f32).collect();
            sum += p.iter().map(|p| f64::from(*p)).sum::<f64>();
            let key = |j: usize| tile * TILE + j;
            for (group, acc) in acc.chunks_mut(GROUP).enumerate() {
                let scale = |j: usize| {
                    let row = key(j) * self.kv_heads + head;
                    scales.of(self, key(j), position).at(row, group * GROUP, self.head_dim)
                };
                let g: Vec<f32> = (0..p.len()).map(|j| f16(f16(p[j]) * scale(j))).collect();
                let most = g.iter().copied().fold(0f32, f32::max);
                if most == 0.0 {
                    continue;
                }
                let factor = f16_round_down(255.0 / most);
                for (j, g) in g.iter().enumerate() {
                    let u = rne(g * factor).clamp(0.0, 255.0);
                    if u == 0.0 || scale(j) == 0.0 {
                        continue;
                    }
                    let v = &self.row(self.v, key(j), position, head)[group * GROUP..(group + 1) * GROUP];
                    let weight = f64::from(u / factor);
                    acc.iter_mut()
                        .zip(v)
                        .for_each(|(acc, v)| *acc += weight * f64::from(rne(v / scale(j))));
                }
            }
        }
        out.iter_mut().zip(acc).for_each(|(out, acc)| *out = (acc / sum) as f32);
    }

    fn e4m3_output(&self, scores: &[f64], position: usize, head: usize, scales: &ValueScales, out: &mut [f32]) {
        const FORTY_OCTAVES: f64 = 40.0 * std::f64::consts::LN_2;
        let (mut running, mut reference, mut sum) = (f64::NEG_INFINITY, f64::NEG_INFINITY, 0.0);
        let mut acc = vec![0f64; self.head_dim];
        for (tile, scores) in scores.chunks(TILE).enumerate() {
            let tile_largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let next = tile_largest.max(running - FORTY_OCTAVES);
            running = running.max(tile_largest);
            rescale(&mut acc, &mut sum, (reference - next).exp());
            reference = next;
            let keys = tile * TILE..tile * TILE + scores.len();
            let largest_scale = keys
                .clone()
                .flat_map(|key| (0..self.head_dim).step_by(16).map(move |dim| (key, dim)))
                .map(|(key, dim)| scales.coded.at(key * self.kv_heads + head, dim, self.head_dim))
                .fold(0f32, f32::max);
            let exponent = i32::from(f32_to_e4m3fn(largest_scale) >> 3).max(1) - 12;
            let (up, down) = (2f32.powi(-exponent), 2f64.powi(exponent));
            for (key, score) in keys.zip(scores) {
                let p = 256.0 * (score - reference).exp();
                sum += p;
                let p = f64::from(e4m3fn_to_f32(f32_to_e4m3fn(p as f32))) * down;
                let v = self.row(self.v, key, position, head);
                for (acc, v) in acc.iter_mut().zip(v) {
                    *acc += p * f64::from(e4m3fn_to_f32(f32_to_e4m3fn(f16(v * up))));
                }
            }
        }
        out.iter_mut().zip(acc).for_each(|(out, acc)| *out = (acc / sum) as f32);
    }
}

/// Multiplies a partial result by the change of its reference; the first tile has nothing to rescale.
fn rescale(acc: &mut [f64], sum: &mut f64, factor: f64) {
    if factor != 1.0 && *sum != 0.0 {
        acc.iter_mut().for_each(|acc| *acc *= factor);
        *sum *= factor;
    }
}

fn f16(x: f32) -> f32 {
    f16_to_f32(f32_to_f16(x))
}

/// Largest FP16 value at or below a positive `x`.
fn f16_round_down(x: f32) -> f32 {
    let word = f32_to_f16(x);
    if f16_to_f32(word) > x {
        f16_to_f32(word - 1)
    } else {
        f16_to_f32(word)
    }
}

fn add_scaled(acc: &mut [f64], p: f64, v: &[f32]) {
    acc.iter_mut().zip(v).for_each(|(acc, v)| *acc += p * f64::from(*v));
}

/// Dot product in f64 over eight running sums, which the compiler keeps in vector registers.
fn dot<A: Copy + Into<f64>>(a: &[A], b: &[f32]) -> f64 {
    let mut lanes = [0f64; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f64 = a8
        .remainder()
        .iter()
        .zip(b8.remainder())
        .map(|(a, b)| (*a).into() * f64::from(*b))
        .sum();
    for (a, b) in a8.zip(b8) {
        for l in 0..8 {
            lanes[l] += a[l].into() * f64::from(b[l]);
        }
    }
    lanes.iter().sum::<f64>() + rest
}
