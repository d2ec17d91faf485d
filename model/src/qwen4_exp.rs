//! The `qwen4_exp` text model, Qwen3.8-Flash-Next. With `S` residual streams `R`, all the same at the start:
//!
//! ```text
//! R = embedding(ids) S times
//! for every block:  R = inject(R, ngrams(ids))       in one block only
//!                   x, w = read(R);  R = write(R, mixer(x), w)
//!                   x, w = read(R);  R = write(R, experts(x), w)
//! logits = mix(R) output_head^T
//! ```
//!
//! `read`, `write` and `mix` are hyper-connections; mixers are Gated DeltaNets and sparse attention. Logits are float32 in
//! every route.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
use perplexity_kernels::backend::{BlockSelection, HeadRequest, HeadScores, RotaryTable};
use perplexity_kernels::{Evaluation, EvaluatorBackend, Precision};
use perplexity_kv::attention::Emulation;
use perplexity_kv::options::KvOptions;

use crate::artifact::Artifact;
use crate::checkpoint::CheckpointSource;
use crate::config::{FeedForwardConfig, FlashNextConfig, LayerType, MoeConfig, TextConfig};
use crate::experts::{CacheStatistics, DeviceExperts, ExpertBank, ExpertStore, Residency};
use crate::layers::Pass;
use crate::layers::delta_net::{DeltaNet, DeltaNetState};
use crate::layers::embedding::Embedding;
use crate::layers::expert_mixture::{Choice, ExpertMixture, Experts, Matrices};
use crate::layers::hyper_connection::{HyperConnection, Mixer, repeat};
use crate::layers::loader::{LoadOptions, Loader};
use crate::layers::ngram_injection::{InjectionState, NgramInjection};
use crate::layers::sparse_attention::{SparseAttention, SparseState};
use crate::ngram::{CheckpointTable, Context, NgramHash, NgramTable, TableOptions, Volume, VolumeError};
use crate::parameters::NGRAM_SCALE;
use crate::rope::{RopeExtension, Rotary};
use crate::route::{Boundary, Route};
use crate::scorer::ModelError;
use crate::source::{SourceError, TextSource};

/// How the parts of the model that others do not have are run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FlashNextOptions {
    /// The n-gram volume, or the checkpoint that the artifact was converted from; the artifact's path with `.ngram` appended
    /// when absent.
    pub ngram_table: Option<PathBuf>,
    /// How a volume's rows are read and kept.
    pub ngram_rows: TableOptions,
    /// Leaves the injection of n-grams out, which is not the model.
    pub without_ngrams: bool,
    /// Whether the activations of packed routed experts are rounded to 4 bits.
    pub four_bit_experts: bool,
    /// Where packed routed experts are.
    pub residency: Residency,
    /// Bytes of unpacked experts kept in all, where they are not all resident.
    pub expert_cache_bytes: u64,
    /// A second copy of the artifact, from which every other expert is read.
    pub expert_stripe: Option<PathBuf>,
}

/// What was ready when it was needed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Packed experts.
    pub experts: CacheStatistics,
    /// Rows of the n-gram table.
    pub rows: CacheStatistics,
}

impl FlashNextOptions {
    /// The n-gram table of `source`, opened and checked; `None` when the injection is left out.
    ///
    /// # Errors
    /// When the volume is not there or is not this model's.
    pub fn open_table(
        &self,
        source: &dyn TextSource,
        dims: &FlashNextConfig,
    ) -> Result<Option<Arc<dyn NgramTable>>, ModelError> {
        if self.without_ngrams {
            return Ok(None);
        }
        if let Some(table) = source.ngram_table() {
            return match &self.ngram_table {
                Some(volume) => Err(ModelError::NgramVolumeOfCheckpoint { path: volume.clone() }),
                None => Ok(Some(table)),
            };
        }
        let path = match (&self.ngram_table, source.artifact()) {
            (Some(path), _) => path.clone(),
            (None, Some(artifact)) => volume_path(artifact.path()),
            (None, None) => return Err(ModelError::NoNgramTable),
        };
        let scale = format!("text/layers/{}/{NGRAM_SCALE}", dims.ple.layer);
        let scale = source.load(&scale, &[1])?[0];
        let geometry = dims.geometry(source.config().vocab_size);
        let id = dims.volume_id.ok_or(ModelError::NoNgramTable)?;
        if path.is_dir() {
            let checkpoint = CheckpointSource::open(&path).map_err(SourceError::from)?;
            let table = CheckpointTable::new(checkpoint, &path, geometry, id, scale)?;
            return Ok(Some(Arc::new(table)));
        }
        let volume = Volume::open(&path, geometry, id, scale, &self.ngram_rows)?;
        Ok(Some(Arc::new(volume)))
    }

    /// The second copy of the experts, opened and checked; `None` when there is none.
    ///
    /// # Errors
    /// When a file of it is missing, has another length, or belongs to another artifact.
    pub fn open_stripe(&self, source: &dyn TextSource) -> Result<Option<Arc<Artifact>>, ModelError> {
        match (&self.expert_stripe, source.artifact()) {
            (None, _) => Ok(None),
            (Some(path), Some(artifact)) => Ok(Some(ExpertBank::open_copy(artifact, path)?)),
            (Some(_), None) => Err(ModelError::NoBank {
                option: "a second copy of the experts",
            }),
        }
    }
}

/// Where the volume of the artifact at `path` is unless said otherwise.
pub fn volume_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".ngram");
    name.into()
}

/// The weights, and what depends on the configuration alone.
#[derive(Debug)]
pub struct Qwen4Exp<B: EvaluatorBackend> {
    embedding: Embedding<B>,
    blocks: Vec<Block<B>>,
    final_mixer: Mixer<B>,
    output_head: B::Weight,
    streams: usize,
    ngrams: Option<Ngrams<B>>,
    rotary: Rotary,
    route: Route,
    kv: Option<KvOptions>,
    device: B::Device,
}

#[derive(Debug)]
struct Block<B: EvaluatorBackend> {
    mixer_connection: HyperConnection<B>,
    mixer: BlockMixer<B>,
    experts_connection: HyperConnection<B>,
    experts: ExpertMixture<B>,
}

#[derive(Debug)]
enum BlockMixer<B: EvaluatorBackend> {
    Attention(Box<SparseAttention<B>>),
    DeltaNet(Box<DeltaNet<B>>),
}

struct Ngrams<B: EvaluatorBackend> {
    hash: NgramHash,
    table: Arc<dyn NgramTable>,
    /// The block before whose mixer they are injected.
    block: usize,
    injection: NgramInjection<B>,
    width: usize,
}

impl<B: EvaluatorBackend> std::fmt::Debug for Ngrams<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ngrams")
            .field("block", &self.block)
            .finish_non_exhaustive()
    }
}

/// A batch of equal-length windows on their way through the model.
#[derive(Debug)]
pub struct Windows<B: EvaluatorBackend> {
    batch: usize,
    position: usize,
    blocks: Vec<BlockState<B>>,
    injection: Option<(Vec<Context>, InjectionState<B>)>,
    rotary: RotaryTable<B>,
}

#[allow(clippy::large_enum_variant, reason = "one per block")]
#[derive(Debug)]
enum BlockState<B: EvaluatorBackend> {
    Attention(SparseState<B>),
    DeltaNet(DeltaNetState<B>),
}

/// What can be seen of a pass, block by block.
pub enum Seen<'a, B: EvaluatorBackend> {
    /// Rows looked up, per token.
    Ngrams(&'a [u64]),
    /// The residual streams before a block, or after the last one.
    Streams(&'a Tensor<B, 3>),
    /// The blocks of keys that queries chose.
    Selection(&'a BlockSelection),
    /// The experts that rows chose.
    Experts(&'a Choice),
}

impl<B: EvaluatorBackend> Windows<B> {
    /// Tokens each window has passed so far.
    pub fn position(&self) -> usize {
        self.position
    }
}

impl<B: EvaluatorBackend> Qwen4Exp<B> {
    /// Loads every parameter; `dims` are those of the source's configuration.
    ///
    /// # Errors
    /// When the source cannot provide one, or the options do not fit the model.
    pub fn load(
        source: &dyn TextSource,
        dims: &FlashNextConfig,
        options: &FlashNextOptions,
        route: Route,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let config: &TextConfig = source.config();
        let table = options.open_table(source, dims)?;
        let stripe = options.open_stripe(source)?;
        let as_it_is = LoadOptions::default();
        // Several of its projections meet float32 rows: no matrix is rounded on loading but for a route of 16-bit weights.
        let loader = Loader::<B>::new(source, &as_it_is, device)
            .unrounded()
            .rounding_to_bf16(route.rounds_weights());
        let blocks = (0..config.layer_types.len())
            .map(|index| {
                let experts = experts(&loader, source, options, stripe.as_ref(), route, index, device)?;
                Block::load(&loader, config, dims, experts, index)
            })
            .collect::<Result<_, _>>()?;
        let vocabulary = [config.vocab_size, config.hidden_size];
        let ngrams = match table {
            Some(table) => Some(Ngrams {
                hash: NgramHash::new(&dims.ngram, config.vocab_size),
                table,
                block: dims.ple.layer,
                injection: NgramInjection::load(
                    &loader.scope(&format!("layers/{}/ple", dims.ple.layer)),
                    config,
                    dims,
                )?,
                width: dims.ple.embed_dim,
            }),
            None => None,
        };
        Ok(Self {
            embedding: Embedding::new(loader.matrix("token_embedding", vocabulary)?),
            blocks,
            final_mixer: Mixer::load(&loader.scope("final_mixer"), config, dims)?,
            output_head: loader.matrix("output_head", vocabulary)?,
            streams: dims.streams,
            ngrams,
            rotary: Rotary::new(config, RopeExtension::None),
            route,
            kv: None,
            device: device.clone(),
        })
    }

    /// Takes other rotary frequencies, one per rotated pair.
    #[must_use]
    pub fn with_rotary_frequencies(mut self, frequencies: Vec<f64>) -> Self {
        self.rotary.frequencies = frequencies;
        self
    }

    /// The model with its rotary angles extended, the indexer's too; `config` is the one it was loaded with.
    #[must_use]
    pub fn with_rope(self, config: &TextConfig, extension: RopeExtension) -> Self {
        Self {
            rotary: Rotary::new(config, extension),
            ..self
        }
    }

    /// Checks the codecs of a KV cache against the model of `config`.
    ///
    /// # Errors
    /// When they do not fit the attention layers, or imitate kernels, which are of dense attention.
    pub fn check_kv(config: &TextConfig, kv: &KvOptions) -> Result<(), ModelError> {
        kv.check(
            &config.attention_layers(),
            config.attention.as_ref().map_or(0, |attention| attention.head_dim),
        )?;
        match kv.emulation {
            Emulation::Format => Ok(()),
            Emulation::Kernel(_) => Err(ModelError::KernelsOfDenseAttention),
        }
    }

    /// The model with its KV cache packed by codecs, which were checked.
    #[must_use]
    pub fn with_kv(self, kv: KvOptions) -> Self {
        Self { kv: Some(kv), ..self }
    }

    /// `batch` windows at position 0, each of at most `capacity` tokens.
    pub fn begin(&self, batch: usize, capacity: usize) -> Windows<B> {
        let state = |(layer, block): (usize, &Block<B>)| match &block.mixer {
            BlockMixer::Attention(attention) => {
                let kv = self.kv.as_ref().map(|kv| (kv, layer));
                BlockState::Attention(attention.state(batch, capacity, kv, &self.rotary, self.route, &self.device))
            }
            BlockMixer::DeltaNet(delta_net) => BlockState::DeltaNet(delta_net.state(batch, &self.device)),
        };
        Windows {
            batch,
            position: 0,
            blocks: self.blocks.iter().enumerate().map(state).collect(),
            injection: self.ngrams.as_ref().map(|ngrams| {
                let contexts = vec![ngrams.hash.begin(); batch];
                (contexts, ngrams.injection.state(batch, &self.device))
            }),
            rotary: self.rotary.table(self.route, capacity, &self.device),
        }
    }

    /// One pass over the next tokens of every window, window after window in `ids`; returns the residual streams after the
    /// last block, `[batch, tokens, streams * hidden]`.
    ///
    /// `observe` sees what happens in block 0, 1, ... and the streams after the last one.
    ///
    /// # Errors
    /// When a row of the n-gram table or a packed expert cannot be read.
    pub fn pass(
        &self,
        windows: &mut Windows<B>,
        ids: &[u32],
        mut observe: impl FnMut(usize, Seen<'_, B>),
    ) -> Result<Tensor<B, 3>, ModelError> {
        let pass = Pass {
            route: self.route,
            first_position: windows.position,
            rotary: &windows.rotary,
            routing: None,
            delta_state: Precision::Full,
        };
        let x = self.embedding.forward(ids, windows.batch, self.route);
        let mut streams = repeat(x, self.streams);
        for (index, (block, state)) in self.blocks.iter().zip(&mut windows.blocks).enumerate() {
            observe(index, Seen::Streams(&streams));
            if let (Some(ngrams), Some((contexts, injection))) = (&self.ngrams, &mut windows.injection)
                && ngrams.block == index
            {
                let (rows, e) = ngrams.look_up(contexts, ids, &self.device)?;
                observe(index, Seen::Ngrams(&rows));
                streams = ngrams.injection.forward(streams, e, injection, self.route);
            }
            let (x, weights) = block.mixer_connection.read(streams.clone(), self.route);
            let y = match (&block.mixer, state) {
                (BlockMixer::Attention(attention), BlockState::Attention(state)) => {
                    attention.forward(x, state, &pass, &mut |selection| {
                        observe(index, Seen::Selection(selection))
                    })
                }
                (BlockMixer::DeltaNet(delta_net), BlockState::DeltaNet(state)) => delta_net.output(x, state, &pass),
                _ => unreachable!("a state is used with the block that made it"),
            };
            streams = HyperConnection::write(streams, y, weights, self.route);
            let (x, weights) = block.experts_connection.read(streams.clone(), self.route);
            let y = block
                .experts
                .forward(x, &pass, &mut |choice| observe(index, Seen::Experts(choice)))?;
            streams = HyperConnection::write(streams, y, weights, self.route);
        }
        observe(self.blocks.len(), Seen::Streams(&streams));
        windows.position += ids.len() / windows.batch;
        Ok(streams)
    }

    /// Scores rows `[rows, streams * hidden]` of the residual streams.
    pub fn score(&self, rows: Tensor<B, 2>, ask: &HeadRequest<'_>) -> HeadScores {
        self.at_head().score_head(self.mix(rows), &self.output_head, ask)
    }

    /// Logits `[rows, vocab_size]` of rows of the residual streams, all at once.
    pub fn logits(&self, rows: Tensor<B, 2>) -> Tensor<B, 2> {
        self.apply_head(self.mix(rows), None)
    }

    /// Logits `[rows, vocab_size]` of final mixtures, in float32 or rounded to `logits`.
    pub fn apply_head(&self, hidden: Tensor<B, 2>, logits: Option<Precision>) -> Tensor<B, 2> {
        let how = self.at_head();
        let to = logits.unwrap_or(how.to);
        let logits = Evaluation { to, ..how }.project(hidden.unsqueeze::<3>(), &self.output_head);
        logits.squeeze_dim::<2>(0)
    }

    /// Logits are float32 in every route.
    fn at_head(&self) -> Evaluation {
        Evaluation {
            to: Precision::Full,
            ..self.route.on(Boundary::Logits)
        }
    }

    /// The final mixture `[rows, hidden]` of rows of the residual streams.
    pub fn mix(&self, rows: Tensor<B, 2>) -> Tensor<B, 2> {
        self.final_mixer
            .forward(rows.unsqueeze::<3>(), self.route)
            .squeeze_dim::<2>(0)
    }

    /// How often packed experts and table rows were ready, over all blocks and passes so far.
    pub fn statistics(&self) -> Statistics {
        let mut experts = CacheStatistics::default();
        self.blocks
            .iter()
            .for_each(|block| experts += block.experts.cache_statistics());
        let rows = self.ngrams.as_ref().map(|ngrams| ngrams.table.statistics());
        Statistics {
            experts,
            rows: rows.unwrap_or_default(),
        }
    }
}

impl<B: EvaluatorBackend> Block<B> {
    fn load(
        loader: &Loader<'_, B>,
        config: &TextConfig,
        dims: &FlashNextConfig,
        experts: Experts<B>,
        index: usize,
    ) -> Result<Self, ModelError> {
        let loader = loader.scope(&format!("layers/{index}"));
        let mixer = match (config.layer_types[index], &config.attention, &config.delta_net) {
            (LayerType::FullAttention, Some(attention), _) => {
                let attention = SparseAttention::load(&loader.scope("attention"), config, attention, dims)?;
                BlockMixer::Attention(Box::new(attention))
            }
            (LayerType::LinearAttention, _, Some(delta_net)) => {
                BlockMixer::DeltaNet(Box::new(DeltaNet::load(&loader.scope("gdn"), config, delta_net)?))
            }
            (kind, _, _) => {
                let (layer, kind) = (index, kind.name());
                return Err(ModelError::MissingDimensions { layer, kind });
            }
        };
        Ok(Self {
            mixer_connection: HyperConnection::load(&loader.scope("attn_hc"), config, dims)?,
            mixer,
            experts_connection: HyperConnection::load(&loader.scope("mlp_hc"), config, dims)?,
            experts: ExpertMixture::load(&loader.scope("moe"), config, experts)?,
        })
    }
}

/// The routed experts of block `index`. Packed ones are multiplied as they are where the model's boundaries are; a route
/// without boundaries, or with those of a 16-bit model, decodes them.
fn experts<B: EvaluatorBackend>(
    loader: &Loader<'_, B>,
    source: &dyn TextSource,
    options: &FlashNextOptions,
    stripe: Option<&Arc<Artifact>>,
    route: Route,
    index: usize,
    device: &B::Device,
) -> Result<Experts<B>, ModelError> {
    let config = source.config();
    let FeedForwardConfig::Moe(MoeConfig {
        num_experts,
        moe_intermediate_size: inner,
        ..
    }) = config.feed_forward
    else {
        return Ok(Experts::Plain(Vec::new()));
    };
    let bank = source.expert_bank(index)?;
    let decoded = route == Route::Exact || route.rounds_weights();
    let has_input_scales = bank.as_ref().is_some_and(|bank| bank.input_scales(0).is_some());
    if options.four_bit_experts && (!has_input_scales || decoded) {
        return Err(ModelError::FourBitExperts { layer: index });
    }
    let Some(bank) = bank else {
        if options.residency != Residency::Device {
            return Err(ModelError::NoBank {
                option: options.residency.option(),
            });
        }
        let loader = loader.scope(&format!("layers/{index}/moe/experts"));
        let load = |expert: usize| Matrices::load(&loader.scope(&expert.to_string()), config.hidden_size, inner);
        return (0..num_experts).map(load).collect::<Result<_, _>>().map(Experts::Plain);
    };
    let bank = match stripe {
        Some(copy) => bank.with_copy(copy)?,
        None => bank,
    };
    let share = options.expert_cache_bytes / config.layer_types.len() as u64;
    if decoded {
        let store = Matrices::decoded(bank, options.residency, share, loader);
        return Ok(Experts::Decoded(store.map_err(SourceError::from)?));
    }
    if DeviceExperts::<B>::fit(&bank, options.four_bit_experts, device) {
        let experts = DeviceExperts::new(bank, options.four_bit_experts, options.residency, share, device);
        return Ok(Experts::Device(experts.map_err(SourceError::from)?));
    }
    Ok(Experts::Integer {
        store: ExpertStore::integers(bank, options.residency, share).map_err(SourceError::from)?,
        four_bit: options.four_bit_experts,
    })
}

impl<B: EvaluatorBackend> Ngrams<B> {
    /// The rows that the next tokens look up, and their embeddings `[batch, tokens, width]`.
    fn look_up(
        &self,
        contexts: &mut [Context],
        ids: &[u32],
        device: &B::Device,
    ) -> Result<(Vec<u64>, Tensor<B, 3>), VolumeError> {
        let batch = contexts.len();
        let tokens = ids.len() / batch;
        let windows = contexts.iter_mut().zip(ids.chunks_exact(tokens));
        let rows: Vec<u64> = windows
            .flat_map(|(context, ids)| self.hash.rows_of(context, ids))
            .collect();
        let mut e = vec![0.0; ids.len() * self.width];
        self.table.read(&rows, &mut e)?;
        let e = Tensor::from_data(TensorData::new(e, [batch, tokens, self.width]), device);
        Ok((rows, e))
    }
}
