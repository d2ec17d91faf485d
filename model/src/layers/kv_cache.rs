//! Keys and values of one attention layer and batch: normalised, rotated keys and plain values.
//!
//! Rows pass through the cache before any query reads them, the token's own included. Whatever the representation, a
//! cache is [`KvCache::append`], then [`KvCache::attend`]. It holds the rows as given, 16-bit values under a route that
//! rounds them so, or packed by a codec, one store per window:
//!
//! ```text
//! k' = B_k k,  v' = B_v v  stored in the codec's bases;   o = B_v^-1 attention(B_k q, k', v')
//! ```
//!
//! On a device of its own the rows stay there, coded bit for bit as on the host. Formats with kernels for both sides are
//! kept packed, and the device's attention takes the codes; the others are coded and decoded in tensor operations as they
//! come and kept as decoded. Either way it attends over decoded rows in half precision (float32 where the result is).

use burn::tensor::{FloatDType, Int, Tensor, TensorData};
use perplexity_kernels::backend::{BlockSelection, CodedSides, RowCoding};
use perplexity_kernels::evaluation::Arithmetic;
use perplexity_kernels::{Evaluation, EvaluatorBackend, Precision};
use perplexity_kv::attention::{Emulation, attend, attend_exact};
use perplexity_kv::options::KvOptions;
use perplexity_kv::registry::{KvPair, Side};
use perplexity_kv::store::{LayerStore, SideStore};

/// Rows of every token so far.
#[derive(Debug)]
pub struct KvCache<B: EvaluatorBackend> {
    rows: Rows<B>,
    tokens: usize,
}

#[derive(Debug)]
enum Rows<B: EvaluatorBackend> {
    /// `[batch, kv_heads, capacity, head_dim]`, room for the whole window; `None` only while a pass appends.
    Plain(Option<[Tensor<B, 4>; 2]>),
    /// One store per window of the batch.
    Coded {
        windows: Vec<LayerStore>,
        pair: KvPair,
        emulation: Emulation,
    },
    /// Codecs of single tokens on the device.
    OnDevice {
        sides: Option<[DeviceRows<B>; 2]>,
        pair: Box<KvPair>,
        /// Of decoded rows and of the queries that meet them.
        precision: Precision,
    },
}

/// Keys or values on a device, in the stored basis.
#[derive(Debug)]
enum DeviceRows<B: EvaluatorBackend> {
    /// Packed words `[batch, kv_heads, capacity, words]`.
    Packed(Tensor<B, 4, Int>, RowCoding),
    /// Rows as decoded, `[batch, kv_heads, capacity, head_dim]`.
    Decoded(Tensor<B, 4>),
}

impl<B: EvaluatorBackend> DeviceRows<B> {
    /// Of no tokens; `shape` `[batch, kv_heads, capacity, head_dim]`.
    fn new(coding: Option<RowCoding>, shape: [usize; 4], device: &B::Device) -> Self {
        let [batch, kv_heads, capacity, _] = shape;
        match coding {
            Some(coding) => {
                let words = Tensor::zeros([batch, kv_heads, capacity, coding.format.words()], device);
                Self::Packed(words, coding)
            }
            None => Self::Decoded(Tensor::zeros(shape, device)),
        }
    }

    /// With rows `x` `[batch, tokens, kv_heads, head_dim]` of the model's basis from `at` on.
    fn append(self, side: Side, x: Tensor<B, 4>, at: usize, precision: Precision) -> Self {
        match self {
            Self::Packed(words, coding) => {
                let words = B::append_coded(words, x, at, coding).expect("a device of its own codes rows");
                Self::Packed(words, coding)
            }
            Self::Decoded(rows) => {
                let decoded = B::round(through_codec(side, x), precision);
                Self::Decoded(B::append_rows(rows, decoded, at))
            }
        }
    }

    /// At least the first `tokens` rows, `[batch, kv_heads, .., head_dim]`.
    fn read(&self, tokens: usize, precision: Precision) -> Tensor<B, 4> {
        match self {
            Self::Packed(words, coding) => B::decoded_rows(words.clone(), tokens, coding.format, precision)
                .expect("a device of its own decodes rows"),
            Self::Decoded(rows) => rows.clone(),
        }
    }

    /// Bytes that `tokens` tokens take of each window.
    fn bytes(&self, tokens: usize) -> usize {
        let (shape, element) = match self {
            Self::Packed(words, _) => (words.dims(), size_of::<u32>()),
            Self::Decoded(rows) => (rows.dims(), rows.dtype().size()),
        };
        shape[0] * shape[1] * tokens * shape[3] * element
    }
}

/// Whether devices of their own keep the decoded rows of this layer: codecs of which every query reads one decoded row per
/// token, and that exist in tensor operations.
pub fn is_decoded_on_devices(kv: &KvOptions, layer: usize) -> bool {
    let pair = kv.dtype.layer(layer);
    let single = |side: &Side| {
        let spec = side.spec();
        spec.block_tokens() == 1 && !(kv.window && spec.window().is_some()) && !matches!(side, Side::Custom(_))
    };
    single(&pair.k) && single(&pair.v) && kv.emulation == Emulation::Format
}

/// How a device packs keys and values: both or neither, since its attention takes them in one shape.
fn codings(pair: &KvPair) -> [Option<RowCoding>; 2] {
    match (pair.k.row_coding(), pair.v.row_coding()) {
        (Some(k), Some(v)) => [Some(k), Some(v)],
        _ => [None; 2],
    }
}

/// Codecs of keys and values that a device of its own keeps packed in this layer, and how; `None` where it does not.
pub fn packed_on_devices(kv: &KvOptions, layer: usize) -> Option<[(Side, RowCoding); 2]> {
    let pair = kv.dtype.layer(layer);
    let [k, v] = codings(pair);
    is_decoded_on_devices(kv, layer).then_some([(pair.k, k?), (pair.v, v?)])
}

/// Bytes that devices hold per token and KV head of this layer for keys and values, at most: packed words, or float32 as
/// other rows begin.
pub fn device_row_bytes(kv: Option<&KvOptions>, layer: usize, head_dim: usize) -> usize {
    let sides = kv
        .filter(|kv| is_decoded_on_devices(kv, layer))
        .map_or([None; 2], |kv| codings(kv.dtype.layer(layer)));
    let bytes = |coding: RowCoding| coding.format.words() * size_of::<u32>();
    sides.map(|side| side.map_or(4 * head_dim, bytes)).iter().sum()
}

/// What devices of their own round decoded rows to, and the queries that meet them, for results in `to`.
pub fn decoded_precision(to: Precision) -> Precision {
    if to == Precision::Full { to } else { Precision::F16 }
}

impl<B: EvaluatorBackend> KvCache<B> {
    /// Empty, rows as given, `shape` `[batch, kv_heads, capacity, head_dim]`.
    pub fn new(shape: [usize; 4], device: &B::Device) -> Self {
        let rows = Rows::Plain(Some([Tensor::zeros(shape, device), Tensor::zeros(shape, device)]));
        Self { rows, tokens: 0 }
    }

    /// Empty, rows packed by the codec of `layer`; `shape` as for [`KvCache::new`], checked against the options.
    pub fn coded(shape: [usize; 4], kv: &KvOptions, layer: usize) -> Self {
        let [batch, kv_heads, _, head_dim] = shape;
        let pair = kv.dtype.layer(layer).clone();
        let windows = (0..batch)
            .map(|_| LayerStore::new(&pair, kv.window, kv_heads, head_dim))
            .collect();
        Self {
            rows: Rows::Coded {
                windows,
                pair,
                emulation: kv.emulation,
            },
            tokens: 0,
        }
    }

    /// As [`KvCache::coded`], rows kept on `device` and decoded there, to half precision where results in `to` are 16 bits
    /// wide; `None` where [`is_decoded_on_devices`] says no.
    pub fn on_device(
        shape: [usize; 4],
        kv: &KvOptions,
        layer: usize,
        to: Precision,
        device: &B::Device,
    ) -> Option<Self> {
        if !is_decoded_on_devices(kv, layer) {
            return None;
        }
        let pair = kv.dtype.layer(layer).clone();
        let rows = Rows::OnDevice {
            sides: Some(codings(&pair).map(|coding| DeviceRows::new(coding, shape, device))),
            pair: Box::new(pair),
            precision: decoded_precision(to),
        };
        Some(Self { rows, tokens: 0 })
    }

    /// Whether a codec rounds the rows, so that nothing else should.
    pub fn is_coded(&self) -> bool {
        !matches!(self.rows, Rows::Plain(_))
    }

    /// Bytes held for rows of a codec, and for the exact copies of windowed codecs; `None` without a codec.
    pub fn packed_bytes(&self) -> Option<(usize, usize)> {
        match &self.rows {
            Rows::Plain(_) => None,
            Rows::Coded { windows, .. } => {
                let sides = windows.iter().flat_map(|window| [window.k.bytes(), window.v.bytes()]);
                Some(sides.fold((0, 0), |(packed, copies), side| (packed + side.0, copies + side.1)))
            }
            Rows::OnDevice { sides, .. } => {
                let sides = sides.as_ref().expect("appending always puts the rows back");
                Some((sides.iter().map(|side| side.bytes(self.tokens)).sum(), 0))
            }
        }
    }

    /// Takes the rows of a pass, `[batch, tokens, kv_heads, head_dim]` each; the capacity must hold them.
    pub fn append(&mut self, keys: Tensor<B, 4>, values: Tensor<B, 4>) {
        let appended = keys.dims()[1];
        match &mut self.rows {
            Rows::Plain(rows) => {
                // Taken out, so that the backend may write in place.
                *rows = rows.take().map(|[k, v]| {
                    [
                        B::append_rows(k, keys, self.tokens),
                        B::append_rows(v, values, self.tokens),
                    ]
                });
            }
            Rows::Coded { windows, .. } => {
                let (keys, values) = (host(keys), host(values));
                let length = keys.len() / windows.len();
                let rows = keys.chunks_exact(length).zip(values.chunks_exact(length));
                for (window, (keys, values)) in windows.iter_mut().zip(rows) {
                    window.k.append(keys);
                    window.v.append(values);
                }
            }
            Rows::OnDevice { sides, pair, precision } => {
                *sides = sides.take().map(|[k, v]| {
                    [
                        k.append(pair.k, keys, self.tokens, *precision),
                        v.append(pair.v, values, self.tokens, *precision),
                    ]
                });
            }
        }
        self.tokens += appended;
    }

    /// Causal attention of the last appended tokens' queries `[batch, tokens, heads, head_dim]`.
    pub fn attend(&self, q: Tensor<B, 4>, how: impl Into<Evaluation>) -> Tensor<B, 4> {
        let first_position = self.tokens - q.dims()[1];
        self.attend_from(q, first_position, None, how)
    }

    /// Attention of queries at positions `first_position..` that are in the cache, over all keys before them or over those
    /// that each query names.
    ///
    /// # Panics
    /// With a selection and kernel emulation.
    pub fn attend_from(
        &self,
        q: Tensor<B, 4>,
        first_position: usize,
        selection: Option<&BlockSelection>,
        how: impl Into<Evaluation>,
    ) -> Tensor<B, 4> {
        let how = how.into();
        let to = how.to;
        match (&self.rows, how.arithmetic) {
            (Rows::Plain(rows), _) => {
                let rows = rows.clone().expect("appending always puts the rows back");
                attend_rows(q, rows, first_position, selection, how)
            }
            (
                Rows::Coded {
                    windows,
                    pair,
                    emulation,
                },
                Arithmetic::Native,
            ) => attend_coded(windows, pair, *emulation, q, first_position, selection, to),
            (Rows::Coded { windows, .. }, _) => {
                let (shape, device) = (q.dims(), q.device());
                let [batch, tokens, heads, head_dim] = shape;
                let queries = host(q);
                let outputs = (windows
                    .iter()
                    .zip(queries.chunks_exact(tokens * heads * head_dim))
                    .enumerate())
                .flat_map(|(index, (window, q))| {
                    let selection = selection.map(|selection| selection.of_window(index, batch));
                    attend_exact(window, q, heads, first_position, selection.as_ref())
                })
                .map(|x| to.nearest(x))
                .collect();
                Tensor::from_data(TensorData::new(outputs, shape), &device)
            }
            // Rows that stay on a device are for its own arithmetic.
            (Rows::OnDevice { sides, pair, precision }, _) => {
                let sides = sides.as_ref().expect("appending always puts the rows back");
                let q = pair.k.spec().basis().forward_on(q, *precision);
                let o = match (sides, selection) {
                    ([DeviceRows::Packed(keys, k), DeviceRows::Packed(values, v)], None) => {
                        let formats = CodedSides {
                            keys: k.format,
                            values: v.format,
                            precision: *precision,
                        };
                        B::coded_attention(q, keys.clone(), values.clone(), formats, first_position, to)
                            .expect("a device of its own reads coded rows")
                    }
                    _ => {
                        let rows = sides.each_ref().map(|side| side.read(self.tokens, *precision));
                        attend_rows(q, rows, first_position, selection, to.into())
                    }
                };
                pair.v.spec().basis().inverse_on(o, to)
            }
        }
    }
}

fn attend_rows<B: EvaluatorBackend>(
    q: Tensor<B, 4>,
    [keys, values]: [Tensor<B, 4>; 2],
    first_position: usize,
    selection: Option<&BlockSelection>,
    how: Evaluation,
) -> Tensor<B, 4> {
    match selection {
        None => how.causal_attention(q, keys, values, first_position),
        Some(selection) => how.sparse_attention(q, keys, values, selection),
    }
}

/// `x` `[batch, tokens, heads, head_dim]` as the codec's decoder gives it back, in the stored basis.
fn through_codec<B: EvaluatorBackend>(side: Side, x: Tensor<B, 4>) -> Tensor<B, 4> {
    let shape @ [batch, tokens, heads, head_dim] = x.dims();
    let rows = x.cast(FloatDType::F32).reshape([batch * tokens, heads, head_dim]);
    let codec = side.tensor::<B>();
    codec
        .load(codec.store(codec.basis().forward_tensor(rows)))
        .reshape(shape)
}

/// Attention over packed rows. Where every query reads the same decoded rows the backend attends over them; windows and
/// kernel emulation choose rows and roundings per query and are left to the codecs' own attention.
fn attend_coded<B: EvaluatorBackend>(
    windows: &[LayerStore],
    pair: &KvPair,
    emulation: Emulation,
    q: Tensor<B, 4>,
    first_position: usize,
    selection: Option<&BlockSelection>,
    to: Precision,
) -> Tensor<B, 4> {
    let ([batch, tokens, heads, head_dim], device) = (q.dims(), q.device());
    let mut queries = host(q);
    let length = tokens * heads * head_dim;
    let tensor =
        |values: Vec<f32>, shape: [usize; 4]| Tensor::<B, 4>::from_data(TensorData::new(values, shape), &device);
    let per_query = windows
        .iter()
        .any(|window| window.k.has_window() || window.v.has_window());
    let outputs = if per_query || emulation != Emulation::Format {
        let rows = windows.iter().zip(queries.chunks_exact(length)).enumerate();
        rows.flat_map(|(index, (window, q))| {
            let selection = selection.map(|selection| selection.of_window(index, batch));
            attend(
                window,
                Some(pair),
                q,
                heads,
                first_position,
                selection.as_ref(),
                emulation,
            )
        })
        .collect()
    } else {
        windows
            .iter()
            .zip(queries.chunks_exact_mut(length))
            .for_each(|(window, q)| window.query_basis(q));
        // `[batch, visible, kv_heads, head_dim]` as decoded, to `[batch, kv_heads, visible, head_dim]`.
        let side = |of: fn(&LayerStore) -> &SideStore| {
            let kv_heads = of(&windows[0]).kv_heads();
            let rows: Vec<f32> = windows.iter().flat_map(|window| of(window).read().coded).collect();
            let stored = rows.len() / (batch * kv_heads * head_dim);
            tensor(rows, [batch, stored, kv_heads, head_dim]).swap_dims(1, 2)
        };
        let (keys, values) = (side(|window| &window.k), side(|window| &window.v));
        let queries = tensor(queries, [batch, tokens, heads, head_dim]);
        let mut outputs = host(attend_rows(
            queries,
            [keys, values],
            first_position,
            selection,
            Precision::Full.into(),
        ));
        windows
            .iter()
            .zip(outputs.chunks_exact_mut(length))
            .for_each(|(window, o)| window.output_basis(o));
        outputs
    };
    B::round(tensor(outputs, [batch, tokens, heads, head_dim]), to)
}

/// Values in C order, widened to float32.
fn host<B: EvaluatorBackend>(x: Tensor<B, 4>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}
