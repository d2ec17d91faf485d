//! A tiny checkpoint in a temporary directory whose tensors can be changed before it is written.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// Types under short names.
pub mod dtype {
    use safetensors::Dtype;

    pub const BF16: Dtype = Dtype::BF16;
    pub const F16: Dtype = Dtype::F16;
    pub const F32: Dtype = Dtype::F32;
    pub const F8: Dtype = Dtype::F8_E4M3;
}

/// A path below the repository's `tests/data`.
pub fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data").join(path)
}

pub struct TinyTensor {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// Two blocks, hidden 8, vocabulary 16; every tensor counts up from 0.
pub struct Tiny {
    directory: tempfile::TempDir,
    pub config: Value,
    pub tensors: BTreeMap<String, TinyTensor>,
    pub dtype: safetensors::Dtype,
}

impl Tiny {
    pub fn dense() -> Self {
        let mut tiny = Self::without_feed_forward("Qwen3_5ForCausalLM", "qwen3_5_text");
        tiny.config["intermediate_size"] = json!(12);
        for layer in 0..2 {
            for (name, shape) in [("gate", [12, 8]), ("up", [12, 8]), ("down", [8, 12])] {
                tiny.set(&format!("model.layers.{layer}.mlp.{name}_proj.weight"), &shape);
            }
        }
        tiny.write();
        tiny
    }

    pub fn moe() -> Self {
        let mut tiny = Self::without_feed_forward("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text");
        for (field, count) in [
            ("num_experts", 3),
            ("num_experts_per_tok", 2),
            ("moe_intermediate_size", 4),
            ("shared_expert_intermediate_size", 4),
        ] {
            tiny.config[field] = json!(count);
        }
        for layer in 0..2 {
            let prefix = format!("model.layers.{layer}.mlp");
            tiny.set(&format!("{prefix}.gate.weight"), &[3, 8]);
            tiny.set(&format!("{prefix}.shared_expert_gate.weight"), &[1, 8]);
            for (name, shape) in [("gate", [4, 8]), ("up", [4, 8]), ("down", [8, 4])] {
                tiny.set(&format!("{prefix}.shared_expert.{name}_proj.weight"), &shape);
                for expert in 0..3 {
                    // Integers below 256, so that every type holds them.
                    let first = 40 * expert + 7 * name.len();
                    let values = (0..32).map(|value| (first + value) as f32).collect();
                    tiny.set_values(&format!("{prefix}.experts.{expert}.{name}_proj.weight"), &shape, values);
                }
            }
        }
        tiny.write();
        tiny
    }

    fn without_feed_forward(architecture: &str, model_type: &str) -> Self {
        let config = json!({
            "architectures": [architecture], "model_type": model_type, "hidden_size": 8, "vocab_size": 16,
            "num_hidden_layers": 2, "max_position_embeddings": 64, "tie_word_embeddings": false,
            "rms_norm_eps": 1e-6, "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
            "rope_parameters": {
                "rope_theta": 10000000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 0, 0],
                "mrope_interleaved": true, "rope_type": "default"
            },
            "linear_num_key_heads": 1, "linear_key_head_dim": 4, "linear_num_value_heads": 2,
            "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4
        });
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut tiny = Self {
            directory,
            config,
            tensors: BTreeMap::new(),
            dtype: dtype::BF16,
        };
        for (name, shape) in [
            ("lm_head.weight", &[16, 8][..]),
            ("model.embed_tokens.weight", &[16, 8]),
            ("model.norm.weight", &[8]),
            ("model.layers.0.linear_attn.in_proj_qkv.weight", &[16, 8]),
            ("model.layers.0.linear_attn.in_proj_z.weight", &[8, 8]),
            ("model.layers.0.linear_attn.in_proj_a.weight", &[2, 8]),
            ("model.layers.0.linear_attn.in_proj_b.weight", &[2, 8]),
            ("model.layers.0.linear_attn.conv1d.weight", &[16, 1, 4]),
            ("model.layers.0.linear_attn.A_log", &[2]),
            ("model.layers.0.linear_attn.dt_bias", &[2]),
            ("model.layers.0.linear_attn.norm.weight", &[4]),
            ("model.layers.0.linear_attn.out_proj.weight", &[8, 8]),
            ("model.layers.1.self_attn.q_proj.weight", &[16, 8]),
            ("model.layers.1.self_attn.k_proj.weight", &[4, 8]),
            ("model.layers.1.self_attn.v_proj.weight", &[4, 8]),
            ("model.layers.1.self_attn.q_norm.weight", &[4]),
            ("model.layers.1.self_attn.k_norm.weight", &[4]),
            ("model.layers.1.self_attn.o_proj.weight", &[8, 8]),
        ] {
            tiny.set(name, shape);
        }
        for layer in 0..2 {
            tiny.set(&format!("model.layers.{layer}.input_layernorm.weight"), &[8]);
            tiny.set(&format!("model.layers.{layer}.post_attention_layernorm.weight"), &[8]);
        }
        tiny
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Adds or replaces a tensor that counts up from 0.
    pub fn set(&mut self, name: &str, shape: &[usize]) {
        let elements: usize = shape.iter().product();
        self.set_values(name, shape, (0..elements).map(|value| value as f32).collect());
    }

    pub fn set_values(&mut self, name: &str, shape: &[usize], values: Vec<f32>) {
        assert_eq!(values.len(), shape.iter().product::<usize>());
        self.tensors.insert(
            name.into(),
            TinyTensor {
                shape: shape.to_vec(),
                values,
            },
        );
    }

    /// Writes the configuration and one `model.safetensors`.
    pub fn write(&self) {
        std::fs::write(self.path().join("config.json"), self.config.to_string()).expect("writes");
        self.write_weights("model.safetensors", |_| true);
    }

    /// Writes two shards and their index instead of the single file.
    pub fn write_sharded(&self) {
        let index = self.index();
        for file in ["model-1.safetensors", "model-2.safetensors"] {
            self.write_weights(file, |name| index["weight_map"][name] == file);
        }
        self.write_index(&index);
        let _ = std::fs::remove_file(self.path().join("model.safetensors"));
    }

    /// Every second tensor in each of two shards.
    pub fn index(&self) -> Value {
        let file = |number: usize| format!("model-{}.safetensors", 1 + number % 2);
        let map: serde_json::Map<_, _> = self
            .tensors
            .keys()
            .enumerate()
            .map(|(number, name)| (name.clone(), file(number).into()))
            .collect();
        json!({"metadata": {}, "weight_map": map})
    }

    pub fn write_index(&self, index: &Value) {
        std::fs::write(self.path().join("model.safetensors.index.json"), index.to_string()).expect("writes");
    }

    pub fn write_weights(&self, file: &str, keep: impl Fn(&str) -> bool) {
        let encoded: Vec<(&String, Vec<usize>, Vec<u8>)> = self
            .tensors
            .iter()
            .filter(|(name, _)| keep(name))
            .map(|(name, tensor)| (name, tensor.shape.clone(), encode(&tensor.values, self.dtype)))
            .collect();
        let views = encoded.iter().map(|(name, shape, bytes)| {
            (
                name.as_str(),
                TensorView::new(self.dtype, shape.clone(), bytes).expect("a valid view"),
            )
        });
        let bytes = safetensors::serialize(views, None).expect("serialises");
        std::fs::write(self.path().join(file), bytes).expect("writes");
    }
}

fn encode(values: &[f32], kind: safetensors::Dtype) -> Vec<u8> {
    let word = |value: &f32| match kind {
        dtype::BF16 => bf16::from_f32(*value).to_le_bytes().to_vec(),
        dtype::F16 => f16::from_f32(*value).to_le_bytes().to_vec(),
        dtype::F32 => value.to_le_bytes().to_vec(),
        _ => vec![0],
    };
    values.iter().flat_map(word).collect()
}
