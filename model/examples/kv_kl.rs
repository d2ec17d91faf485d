//! KL divergence, top-1 agreement and likelihood of KV codecs against bf16 on a checkpoint and some texts.
//!
//! `cargo run --release -p perplexity-model --example kv_kl -- CHECKPOINT TEXTS [CODEC ..]`
//!
//! Texts are cut into windows of 1,024 tokens, each from an empty state; every position but the first of a window is
//! scored over all public tokens, `KL = sum_v p_bf16(v) (ln p_bf16(v) - ln p_codec(v))`. A codec is a `--kv-dtype`
//! spelling, with `/off` behind it the exact window is off; `mine` is the codec of `kv/examples/my_codec.rs`. Without
//! codecs all built-in ones run.

#[path = "../../kv/examples/my_codec.rs"]
#[allow(dead_code, unreachable_pub, reason = "only the codec is used")]
mod my_codec;

use burn_flex::{Flex, FlexDevice};
use perplexity_kv::options::KvOptions;
use perplexity_kv::registry::{Custom, KvPair, variants};
use perplexity_model::checkpoint::CheckpointSource;
use perplexity_model::config::LayerType;
use perplexity_model::qwen3_5::Qwen3_5;
use perplexity_model::route::Route;
use perplexity_model::source::TextSource;
use std::path::Path;
use tokenizers::Tokenizer;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Tokens per window.
const CONTEXT: usize = 1024;
/// Scored positions per computed block of logits.
const ROWS: usize = 256;

static MY_CODEC: my_codec::OnFlex = my_codec::ON_HOST;

fn options(spelling: &str) -> Result<KvOptions, Failure> {
    let (name, window) = spelling
        .strip_suffix("/off")
        .map_or((spelling, true), |name| (name, false));
    let dtype = match name {
        "mine" => KvPair::from(Custom {
            name: "mine",
            codec: &MY_CODEC,
        })
        .into(),
        name => name.parse()?,
    };
    Ok(KvOptions {
        window,
        ..KvOptions::new(dtype)
    })
}

/// Log-probabilities `[positions, public]` of every window with a cache of the given codec.
fn log_probabilities(
    source: &CheckpointSource,
    kv: &KvOptions,
    windows: &[Vec<u32>],
    public: usize,
    mut each: impl FnMut(usize, usize, &[f32]),
) -> Result<(), Failure> {
    let model = Qwen3_5::<Flex>::load(source, Route::Normal, &FlexDevice)?.with_kv(source.config(), kv.clone())?;
    for (index, ids) in windows.iter().enumerate() {
        let fed = &ids[..ids.len() - 1];
        let hidden = model.pass(&mut model.begin(1, fed.len()), fed, |_, _| {});
        let [_, tokens, width] = hidden.dims();
        let hidden = hidden.reshape([tokens, width]);
        for (block, rows) in hidden.split(ROWS, 0).into_iter().enumerate() {
            let logits = model.logits(rows);
            let [count, width] = logits.dims();
            let logits: Vec<f32> = logits.into_data().iter::<f32>().collect();
            for row in 0..count {
                let logits = &logits[row * width..row * width + public];
                let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
                let normaliser = f64::from(largest) + sum.ln();
                let row_values: Vec<f32> = logits
                    .iter()
                    .map(|logit| (f64::from(*logit) - normaliser) as f32)
                    .collect();
                each(index, block * ROWS + row, &row_values);
            }
        }
    }
    Ok(())
}

fn top(values: &[f32]) -> usize {
    (1..values.len()).fold(0, |best, at| if values[at] > values[best] { at } else { best })
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [checkpoint, texts, codecs @ ..] = &arguments[..] else {
        return Err("expected CHECKPOINT TEXTS [CODEC ..]".into());
    };
    let source = CheckpointSource::open(Path::new(checkpoint))?;
    let tokenizer = Tokenizer::from_file(Path::new(checkpoint).join("tokenizer.json"))?;
    let public = tokenizer.get_vocab_size(true);
    let mut files: Vec<_> = std::fs::read_dir(texts)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_, std::io::Error>>()?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "txt"));
    files.sort();
    let mut windows = Vec::new();
    for file in &files {
        let ids = tokenizer
            .encode(std::fs::read_to_string(file)?, false)?
            .get_ids()
            .to_vec();
        windows.extend(
            ids.chunks(CONTEXT)
                .filter(|window| window.len() > 1)
                .map(<[u32]>::to_vec),
        );
    }
    let built_in = || variants().map(|variant| variant.name.to_owned()).collect();
    let codecs: Vec<String> = if codecs.is_empty() { built_in() } else { codecs.to_vec() };

    let mut reference: Vec<Vec<f32>> = windows.iter().map(|_| Vec::new()).collect();
    let keep = |window: usize, _: usize, row: &[f32]| reference[window].extend_from_slice(row);
    log_probabilities(&source, &options("bf16")?, &windows, public, keep)?;
    let positions: usize = reference.iter().map(|rows| rows.len() / public).sum();
    println!(
        "{} texts, {} windows, {positions} positions, {public} public tokens",
        files.len(),
        windows.len()
    );
    let config = source.config();
    let attention = config
        .attention
        .as_ref()
        .ok_or("a model without attention has no KV cache")?;
    println!(
        "{:<14} {:>9} {:>10} {:>10} {:>8} {:>10} {:>10}",
        "codec", "B/token", "mean KL", "max KL", "top-1", "mean dNLL", "perplexity"
    );
    for name in &codecs {
        let kv = options(name)?;
        let (mut kl, mut worst, mut agree, mut nll, mut delta) = (0.0, 0f64, 0usize, 0.0, 0.0);
        log_probabilities(&source, &kv, &windows, public, |window, position, row| {
            let p = &reference[window][position * public..(position + 1) * public];
            let divergence: f64 = p
                .iter()
                .zip(row)
                .map(|(p, q)| f64::from(*p).exp() * (f64::from(*p) - f64::from(*q)))
                .sum();
            kl += divergence;
            worst = worst.max(divergence);
            agree += usize::from(top(p) == top(row));
            let target = windows[window][position + 1] as usize;
            nll -= f64::from(row[target]);
            delta += f64::from(p[target] - row[target]);
        })?;
        let n = positions as f64;
        let bytes = kv.dtype.default.bytes_per_token_and_head(attention.head_dim) * attention.num_kv_heads as f64;
        let layers =
            (0..config.layer_types.len()).filter(|layer| config.layer_types[*layer] == LayerType::FullAttention);
        println!(
            "{name:<14} {:>9} {:>10.6} {worst:>10.4} {:>7.2}% {:>+10.6} {:>10.5}",
            bytes * layers.count() as f64,
            kl / n,
            100.0 * agree as f64 / n,
            delta / n,
            (nll / n).exp()
        );
    }
    Ok(())
}
