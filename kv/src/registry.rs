//! Names of the built-in codecs, and the `--kv-dtype` grammar.
//!
//! ```text
//! kv-dtype := codec { ";" layers "=" codec }            codec for every layer, then exceptions
//! codec    := name | "k=" name "," "v=" name            a pair by name, or K and V of two pairs
//! layers   := range { "," range }                       range := number | number "-" number, model layers from 0
//! name     := base | base "@" variant                   without a variant: the current lineage
//! ```
//!
//! `bf16;3,7=int8` keeps bf16 except in layers 3 and 7; `k=fp8,v=nvfp4` stores K as `fp8` does and V as `nvfp4` does.

use crate::basis::Basis;
use crate::codec::{CodecSpec, HostCodec, TensorCodec, Window, bytes_per_row, decode_rows, encode_rows};
use crate::codecs::{bf16, fp8, int8, k4v2, k8v4, kivi, nvfp4, rk2v4_e8, rk4v4, rk4v4_e8, rk8v4, turbo, vq2};
use crate::layout::Layout;
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use perplexity_kernels::backend::RowCoding;
use perplexity_kernels::ops::coded_rows::ROW;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// One named K/V pair of a codec file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Variant {
    /// Option spelling, `base` or `base@variant`.
    pub name: &'static str,
    /// Name written to reports.
    pub recorded: &'static str,
    /// What K stores.
    pub k: Side,
    /// What V stores.
    pub v: Side,
}

macro_rules! sides {
    ($($(#[$doc:meta])* $name:ident($codec:ty)),* $(,)?) => {
        /// A built-in codec of one side.
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub enum Side {
            $($(#[$doc])* $name($codec)),*
        }

        impl Side {
            /// The codec's description.
            pub fn spec(&self) -> &dyn CodecSpec {
                match self { $(Side::$name(codec) => codec),* }
            }

            /// The codec on host rows.
            pub fn host(self) -> Arc<dyn HostCodec> {
                match self { $(Side::$name(codec) => Arc::new(codec)),* }
            }

            /// The codec in tensor operations.
            pub fn tensor<B: Backend>(self) -> Arc<dyn TensorCodec<B>> {
                match self { $(Side::$name(codec) => Arc::new(codec)),* }
            }
        }
    };
}

sides! {
    /// The bf16 word.
    Bf16(bf16::Bf16),
    /// The FP16 word.
    F16(bf16::F16),
    /// INT8 or INT4 with a scale per group.
    Absmax(int8::Absmax),
    /// E4M3 with a row scale.
    Fp8(fp8::Fp8),
    /// E2M1 with E4M3 scales.
    Nvfp4(nvfp4::Nvfp4),
    /// Pattern-and-sign words.
    Vq2(vq2::Vq2),
    /// 4-bit Lloyd-Max with a row scale.
    Lloyd4Row(k4v2::Lloyd4Row),
    /// 4-bit Lloyd-Max with least-squares group scales.
    Lloyd4(rk4v4::Lloyd4),
    /// Mid-rise INT4.
    MidRise4(rk4v4::MidRise4),
    /// Rounded E8 points.
    E8Snap(rk4v4_e8::E8Snap),
    /// E8 root, radius and axis.
    E8Root(rk2v4_e8::E8Root),
    /// Keys with a range per channel.
    KiviK(kivi::KiviK),
    /// Values with a range per token.
    KiviV(kivi::KiviV),
    /// Random rotation and scalar quantiser.
    Turbo(turbo::Turbo),
    /// A codec from elsewhere.
    Custom(Custom),
}

impl Side {
    /// How devices code the rows of this side in kernels of their own; `None` where they do in tensor operations.
    pub fn row_coding(&self) -> Option<RowCoding> {
        let spec = self.spec();
        let signed = matches!(spec.basis(), Basis::SignedHadamard { .. });
        let format = spec.row_format().filter(|_| !signed)?;
        let block = spec.basis().block(ROW).unwrap_or(1);
        Some(RowCoding { block, format })
    }
}

/// A codec that is not in the table, by reference; two are equal when their names are.
#[derive(Debug, Clone, Copy)]
pub struct Custom {
    /// Name for reports.
    pub name: &'static str,
    /// The codec on host rows; a tensor codec is wrapped in [`OnTensors`](crate::codec::OnTensors) first.
    pub codec: &'static dyn HostCodec,
}

impl PartialEq for Custom {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl CodecSpec for Custom {
    fn basis(&self) -> Basis {
        self.codec.basis()
    }
    fn block_tokens(&self) -> usize {
        self.codec.block_tokens()
    }
    fn window(&self) -> Option<Window> {
        self.codec.window()
    }
    fn supports(&self, head_dim: usize) -> bool {
        self.codec.supports(head_dim)
    }
    fn head_dims(&self) -> String {
        self.codec.head_dims()
    }
    fn layout(&self, head_dim: usize) -> Layout {
        self.codec.layout(head_dim)
    }
}

impl HostCodec for Custom {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        self.codec.encode(rows, entries);
    }
    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        self.codec.decode(entries, rows);
    }
}

/// Through the host, whatever the backend.
impl<B: Backend> TensorCodec<B> for Custom {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let ([tokens, heads, dim], device) = (rows.dims(), rows.device());
        let rows: Vec<f32> = rows.into_data().iter::<f32>().collect();
        let packed = encode_rows(self, &rows, heads, dim);
        let layout = self.layout(dim);
        let mut entries = vec![0; layout.entries()];
        let mut words = Vec::with_capacity(packed.len());
        for block in packed.chunks_exact(layout.bytes()) {
            layout.unpack(block, &mut entries);
            words.extend(entries.iter().map(|word| i32::from(*word)));
        }
        let shape = [tokens / self.block_tokens(), heads, layout.entries()];
        Tensor::from_data(TensorData::new(words, shape).convert::<B::IntElem>(), &device)
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let ([blocks, heads, count], device) = (entries.dims(), entries.device());
        let words: Vec<u16> = entries.into_data().iter::<i64>().map(|word| word as u16).collect();
        let (layout, dim) = self.layout_of(count);
        let mut packed = vec![0; blocks * heads * layout.bytes()];
        for (words, bytes) in words.chunks_exact(count).zip(packed.chunks_exact_mut(layout.bytes())) {
            layout.pack(words, bytes);
        }
        let rows = decode_rows(self, &packed, heads, dim);
        Tensor::from_data(
            TensorData::new(rows, [blocks * self.block_tokens(), heads, dim]),
            &device,
        )
    }
}

impl Custom {
    /// The layout with `entries` entries per block, and its row length: entries grow with the row.
    fn layout_of(&self, entries: usize) -> (Layout, usize) {
        (1..=entries)
            .filter(|dim| self.supports(*dim))
            .map(|dim| (self.layout(dim), dim))
            .find(|(layout, _)| layout.entries() == entries)
            .expect("entries of a row that the codec supports")
    }
}

/// Every built-in pair, files in the order of the format table; of the variants of one base name the default is first.
pub fn variants() -> impl Iterator<Item = &'static Variant> {
    [
        bf16::VARIANTS,
        int8::VARIANTS,
        fp8::VARIANTS,
        nvfp4::VARIANTS,
        k8v4::VARIANTS,
        vq2::VARIANTS,
        k4v2::VARIANTS,
        rk8v4::VARIANTS,
        rk4v4::VARIANTS,
        rk4v4_e8::VARIANTS,
        rk2v4_e8::VARIANTS,
        kivi::VARIANTS,
        turbo::VARIANTS,
    ]
    .into_iter()
    .flatten()
}

/// The pair called `name`; a bare base name means its first variant.
///
/// # Errors
/// [`KvError::UnknownCodec`] with the accepted names.
pub fn find(name: &str) -> Result<&'static Variant, KvError> {
    let matches = |variant: &&Variant| variant.name == name || variant.name.split('@').next() == Some(name);
    variants()
        .find(matches)
        .ok_or_else(|| KvError::UnknownCodec { name: name.into() })
}

/// Accepted codec names, for messages and help texts.
pub fn accepted_names() -> String {
    variants().map(|variant| variant.name).collect::<Vec<_>>().join(", ")
}

/// A refused KV-cache option.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KvError {
    /// No codec of that name.
    #[error("unknown KV codec `{name}`; accepted: {}", accepted_names())]
    UnknownCodec {
        /// The name given.
        name: String,
    },
    /// An item that is neither a name nor `k=NAME,v=NAME`.
    #[error("`{item}` is not a KV codec: expected a name or k=NAME,v=NAME")]
    Pair {
        /// The item given.
        item: String,
    },
    /// An item of the layer table that is not `layers=codec`.
    #[error("`{item}` is not an entry of a KV layer table: expected LAYERS=CODEC, LAYERS like 3,7 or 0-5")]
    LayerEntry {
        /// The item given.
        item: String,
    },
    /// A layer named twice in the table.
    #[error("layer {layer} appears twice in the KV layer table")]
    DuplicateLayer {
        /// The layer.
        layer: usize,
    },
    /// A layer table that names every layer with a KV cache, and a format for the others.
    #[error("`{codec}` is for no layer: the KV layer table names every layer with a KV cache; put one of theirs first")]
    UnusedDefault {
        /// The format of the remaining layers.
        codec: String,
    },
    /// A layer of the table without a KV cache.
    #[error("the KV layer table names layer {layer}, which has no KV cache; layers with one: {attention:?}")]
    NoCache {
        /// The layer named.
        layer: usize,
        /// Layers with a cache.
        attention: Vec<usize>,
    },
    /// A codec that cannot store rows of the model's head dimension.
    #[error("KV codec `{codec}` cannot store rows of {head_dim} values: it is defined for {expected}")]
    HeadDim {
        /// The codec.
        codec: String,
        /// The model's head dimension.
        head_dim: usize,
        /// The head dimensions of the format.
        expected: String,
    },
}

/// The codecs of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct KvPair {
    /// Full option spelling, variants included.
    pub name: String,
    /// Name written to reports.
    pub recorded: String,
    /// What K stores.
    pub k: Side,
    /// What V stores.
    pub v: Side,
}

impl From<&Variant> for KvPair {
    fn from(variant: &Variant) -> Self {
        Self {
            name: variant.name.into(),
            recorded: variant.recorded.into(),
            k: variant.k,
            v: variant.v,
        }
    }
}

impl std::str::FromStr for KvPair {
    type Err = KvError;

    fn from_str(item: &str) -> Result<Self, KvError> {
        let item = item.trim();
        if !item.contains('=') {
            return Ok(find(item)?.into());
        }
        let wrong = || KvError::Pair { item: item.into() };
        let (first, second) = item.split_once(',').ok_or_else(wrong)?;
        let (key_first, first) = first.split_once('=').ok_or_else(wrong)?;
        let (key_second, second) = second.split_once('=').ok_or_else(wrong)?;
        let (k, v) = match (key_first.trim(), key_second.trim()) {
            ("k", "v") => (find(first.trim())?, find(second.trim())?),
            ("v", "k") => (find(second.trim())?, find(first.trim())?),
            _ => return Err(wrong()),
        };
        if k == v {
            return Ok(k.into());
        }
        Ok(Self {
            name: format!("k={},v={}", k.name, v.name),
            recorded: format!("k={},v={}", k.recorded, v.recorded),
            k: k.k,
            v: v.v,
        })
    }
}

impl From<Custom> for KvPair {
    /// The codec for K and for V.
    fn from(codec: Custom) -> Self {
        let side = Side::Custom(codec);
        Self {
            name: codec.name.into(),
            recorded: codec.name.into(),
            k: side,
            v: side,
        }
    }
}

impl From<KvPair> for KvDtype {
    /// The pair in every layer.
    fn from(default: KvPair) -> Self {
        Self {
            default,
            layers: BTreeMap::new(),
        }
    }
}

impl KvPair {
    /// Stored bytes per token and KV head, K and V together, exact copies not counted.
    pub fn bytes_per_token_and_head(&self, head_dim: usize) -> f64 {
        bytes_per_row(self.k.spec(), head_dim) + bytes_per_row(self.v.spec(), head_dim)
    }

    /// Whether K or V store scales beside their codes.
    pub fn has_scales(&self, head_dim: usize) -> bool {
        [self.k.spec(), self.v.spec()]
            .iter()
            .any(|spec| spec.layout(head_dim).0.len() > 1)
    }

    /// Whether some keys are read from an exact copy that could also be read from codes. A codec of several tokens per
    /// block keeps its copy whatever is asked: an incomplete block has nothing else.
    pub fn has_window(&self) -> bool {
        let optional = |spec: &dyn CodecSpec| spec.window().is_some() && spec.block_tokens() == 1;
        optional(self.k.spec()) || optional(self.v.spec())
    }
}

/// A parsed `--kv-dtype`: the codec of every layer.
#[derive(Debug, Clone, PartialEq)]
pub struct KvDtype {
    /// Codec of the layers that the table does not name.
    pub default: KvPair,
    /// Exceptions by model layer.
    pub layers: BTreeMap<usize, KvPair>,
}

impl std::str::FromStr for KvDtype {
    type Err = KvError;

    fn from_str(text: &str) -> Result<Self, KvError> {
        let mut items = text.split(';');
        let default = items.next().unwrap_or_default().parse()?;
        let mut layers = BTreeMap::new();
        for item in items {
            let wrong = || KvError::LayerEntry {
                item: item.trim().into(),
            };
            let (ranges, codec) = item.split_once('=').ok_or_else(wrong)?;
            let pair: KvPair = codec.parse()?;
            for range in ranges.split(',') {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let digits = |text: &&str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
                let number = |text: &str| {
                    Some(text.trim())
                        .filter(digits)
                        .and_then(|text| text.parse::<u16>().ok())
                };
                let number = |text: &str| number(text).map(usize::from).ok_or_else(wrong);
                let (first, last) = (number(first)?, number(last)?);
                if first > last {
                    return Err(wrong());
                }
                for layer in first..=last {
                    if layers.insert(layer, pair.clone()).is_some() {
                        return Err(KvError::DuplicateLayer { layer });
                    }
                }
            }
        }
        Ok(Self { default, layers })
    }
}

/// The full option spelling: parsing it gives the same table.
impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_with(f, |pair| &pair.name)
    }
}

impl KvDtype {
    /// The codec of model layer `layer`.
    pub fn layer(&self, layer: usize) -> &KvPair {
        self.layers.get(&layer).unwrap_or(&self.default)
    }

    /// Checks the table against a model: `attention` lists the layers with a KV cache.
    ///
    /// # Errors
    /// When the table names another layer, or a codec cannot store rows of `head_dim` values.
    pub fn check(&self, attention: &[usize], head_dim: usize) -> Result<(), KvError> {
        if let Some(layer) = self.layers.keys().find(|layer| !attention.contains(layer)) {
            return Err(KvError::NoCache {
                layer: *layer,
                attention: attention.to_vec(),
            });
        }
        if !attention.is_empty() && attention.iter().all(|layer| self.layers.contains_key(layer)) {
            return Err(KvError::UnusedDefault {
                codec: self.default.name.clone(),
            });
        }
        for pair in attention.iter().map(|layer| self.layer(*layer)) {
            for spec in [pair.k.spec(), pair.v.spec()] {
                if !spec.supports(head_dim) || !spec.basis().supports(head_dim) {
                    let codec = pair.name.clone();
                    return Err(KvError::HeadDim {
                        codec,
                        head_dim,
                        expected: spec.head_dims(),
                    });
                }
            }
        }
        Ok(())
    }

    /// Name written to reports: recorded names in the option's grammar.
    pub fn recorded(&self) -> String {
        struct Recorded<'a>(&'a KvDtype);
        impl fmt::Display for Recorded<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.write_with(f, |pair| &pair.recorded)
            }
        }
        Recorded(self).to_string()
    }

    /// Stored bytes per token over the layers `attention`, exact copies not counted.
    pub fn bytes_per_token(&self, attention: &[usize], kv_heads: usize, head_dim: usize) -> f64 {
        attention
            .iter()
            .map(|layer| self.layer(*layer).bytes_per_token_and_head(head_dim) * kv_heads as f64)
            .sum()
    }

    fn write_with<'a>(&'a self, f: &mut fmt::Formatter<'_>, name: impl Fn(&'a KvPair) -> &'a str) -> fmt::Result {
        f.write_str(name(&self.default))?;
        self.layers
            .iter()
            .try_for_each(|(layer, pair)| write!(f, ";{layer}={}", name(pair)))
    }
}
