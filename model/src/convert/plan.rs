//! Which objects an artifact will hold: parameters packed into parents, sizes and offsets, permissions.
//!
//! Parameters that one projection of the same activation reads are stored as one matrix, row blocks in a fixed order, if
//! they have the same encoding; otherwise smaller groups are tried, then single objects. Imported NVFP4 weights share a
//! matrix only if they have the same divisor, and with 4-bit activations the same activation divisor too. Packed groups
//! come first, block by block, then everything else in declaration order. The arithmetic needs shapes only.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::ConvertError;
use super::recipe::{Decision, Encoding, Recipe};
use crate::checkpoint::QuantizedWeight;
use crate::config::TextConfig;
use crate::formats::{Format, encoded_size};
use crate::parameters::{EXPERT_BANK, Parameter, RequiredFormat, parameters};
use crate::source::ActivationPolicy;

/// Row blocks of a parent, by role, in order; of several groups with common members the first that fits is taken.
const GROUPS: [&[&str]; 16] = [
    &[
        "attention/query",
        "attention/gate",
        "attention/key",
        "attention/value",
        "attention/index_query",
        "attention/index_key",
    ],
    &["attn_hc/down", "attn_hc/inject"],
    &["mlp_hc/down", "mlp_hc/inject"],
    &["ple/key_projection", "ple/value_projection"],
    &["attention/query", "attention/key", "attention/gate", "attention/value"],
    &["attention/query", "attention/key"],
    &["attention/gate", "attention/value"],
    &["gdn/query", "gdn/key", "gdn/value", "gdn/z"],
    &["gdn/query", "gdn/key"],
    &["gdn/value", "gdn/z"],
    &CONTROL_GROUP,
    &["mlp/gate", "mlp/up"],
    &["moe/router", "moe/shared_score"],
    &["moe/experts/gate", "moe/experts/up"],
    &["moe/experts/down"],
    &["moe/shared/gate", "moe/shared/up"],
];
const CONTROL_GROUP: [&str; 2] = ["gdn/a_projection", "gdn/b_projection"];

/// One tensor object to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parent {
    /// Object id, `weight/000000` and so on.
    pub id: String,
    /// Extents.
    pub shape: Vec<u64>,
    /// Format and method.
    pub encoding: Encoding,
    /// Whether the words are the source's, and the method has no part in them.
    pub imported: bool,
    /// Encoded size in bytes.
    pub bytes: u64,
    /// The parameters in it, in order of their elements.
    pub members: Vec<Parameter>,
}

/// The objects of an artifact, in the order they are written.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Tensor objects.
    pub parents: Vec<Parent>,
    /// Parameters that share the object of another one: name, and the name of the one that is stored.
    pub shared: Vec<(Parameter, String)>,
    /// Activation permission of every parameter that multiplies an activation.
    pub policies: HashMap<String, ActivationPolicy>,
    /// Activation divisor of every parameter that permits 4-bit activations.
    pub activation_divisors: HashMap<String, f32>,
    /// What differs from the recipe, in words.
    pub notes: Vec<String>,
}

impl Plan {
    /// Plans an artifact of `config` by `recipe` from floating-point weights. Four-bit activations are permitted only at
    /// inputs that have an entry in `activation_divisors`.
    ///
    /// # Errors
    /// When a size overflows.
    pub fn new(
        config: &TextConfig,
        recipe: &Recipe,
        activation_divisors: &BTreeMap<String, f32>,
    ) -> Result<Self, ConvertError> {
        Self::importing(config, recipe, activation_divisors, &HashMap::new())
    }

    /// As [`Self::new`], from a source whose parameters in `quantized` are quantised: those that are so in the format that
    /// the recipe wants are imported, with their activation divisors where `activation_divisors` has none.
    ///
    /// # Errors
    /// When a size overflows.
    pub fn importing(
        config: &TextConfig,
        recipe: &Recipe,
        activation_divisors: &BTreeMap<String, f32>,
        quantized: &HashMap<String, QuantizedWeight>,
    ) -> Result<Self, ConvertError> {
        let mut planner = Planner::new(config, recipe, activation_divisors, quantized);
        planner.pack_groups(config.layer_types.len())?;
        planner.place_the_rest(config.tie_word_embeddings)?;
        let mut notes = planner.notes();
        notes.extend(recipe.meant_for_another(config));
        Ok(Self {
            parents: planner.parents,
            shared: planner.shared,
            policies: planner.policies,
            activation_divisors: planner.activation_divisors,
            notes,
        })
    }

    /// End of the last tensor object when the first starts at `start`.
    ///
    /// # Errors
    /// When it overflows.
    pub fn end_from(&self, start: u64) -> Result<u64, ConvertError> {
        let end = |end: u64, parent: &Parent| {
            end.checked_next_multiple_of(parent.encoding.format.layout().alignment())?
                .checked_add(parent.bytes)
        };
        self.parents.iter().try_fold(start, end).ok_or(ConvertError::Overflow {
            what: "the size of the payload",
        })
    }

    /// Stored bits per weight over all parameters.
    pub fn bits_per_weight(&self) -> f64 {
        let elements = |parent: &Parent| {
            // A bank `[E, H, I]` has three matrices per expert.
            let matrices = if parent.encoding.format == Format::Nvfp4Mul {
                3.0
            } else {
                1.0
            };
            matrices * parent.shape.iter().map(|extent| *extent as f64).product::<f64>()
        };
        let (bits, weights) = self.parents.iter().fold((0.0, 0.0), |(bits, weights), parent| {
            (bits + 8.0 * parent.bytes as f64, weights + elements(parent))
        });
        bits / weights
    }
}

struct Planner {
    /// Parameters not placed yet.
    waiting: Vec<Option<Planned>>,
    /// Places in `waiting` by block and role.
    places: HashMap<(usize, &'static str), Vec<usize>>,
    parents: Vec<Parent>,
    shared: Vec<(Parameter, String)>,
    policies: HashMap<String, ActivationPolicy>,
    activation_divisors: HashMap<String, f32>,
    fallback: Encoding,
    separate_control: bool,
    /// Parameters that did not fit their format, by format and what they got: how many, and the first.
    fallen: BTreeMap<(Format, Format), (usize, String)>,
    /// Quantised parameters that are encoded anew, by the source's format and what they got.
    requantized: BTreeMap<(&'static str, Format), (usize, String)>,
    imported: usize,
    /// Parameters that lack a divisor for the 4-bit activations they would permit.
    withheld: usize,
    idle_rules: Vec<String>,
    /// Banks of routed experts, where the recipe is not of a model that has them.
    banks: usize,
}

struct Planned {
    parameter: Parameter,
    decision: Decision,
    /// How the source holds it, if quantised.
    source: Option<QuantizedWeight>,
    activation_divisor: Option<f32>,
}

impl Planned {
    /// The source's words, if they are in the decided format.
    fn import(&self) -> Option<&QuantizedWeight> {
        let format = self.decision.encoding.format;
        self.source.as_ref().filter(|source| source.format == Some(format))
    }

    /// The activation permission before a missing divisor withdraws it.
    fn wanted_policy(&self) -> ActivationPolicy {
        match self.import() {
            Some(source) => self.decision.policy.min(source.policy),
            None => self.decision.policy_if_encoded,
        }
    }

    /// The activation permission, and its divisor where it needs one.
    fn permission(&self) -> (ActivationPolicy, Option<f32>) {
        match (self.wanted_policy(), self.activation_divisor) {
            (ActivationPolicy::AllowA4, None) => (ActivationPolicy::A16Only, None),
            (ActivationPolicy::AllowA4, divisor) => (ActivationPolicy::AllowA4, divisor),
            (policy, _) => (policy, None),
        }
    }

    /// What all members of a parent have in common.
    fn kind(&self) -> (Encoding, bool, Option<u32>, Option<u32>, usize) {
        let import = self.import();
        let is_nvfp4 = self.decision.encoding.format == Format::Nvfp4;
        (
            self.decision.encoding,
            import.is_some(),
            import.and_then(|source| source.weight_divisor).map(f32::to_bits),
            self.permission().1.filter(|_| is_nvfp4).map(f32::to_bits),
            self.parameter.shape[1],
        )
    }
}

impl Planner {
    fn new(
        config: &TextConfig,
        recipe: &Recipe,
        activation_divisors: &BTreeMap<String, f32>,
        quantized: &HashMap<String, QuantizedWeight>,
    ) -> Self {
        let mut waiting = Vec::new();
        let mut used = HashSet::new();
        let mut places: HashMap<_, Vec<usize>> = HashMap::new();
        let mut banks = 0;
        for parameter in parameters(config) {
            banks += usize::from(parameter.format == RequiredFormat::Nvfp4Mul);
            let decision = match parameter.format {
                RequiredFormat::Any => recipe.decide(parameter.role, parameter.layer),
                RequiredFormat::Bf16 => Decision::of(Encoding::BF16),
                RequiredFormat::Fp32 => Decision::of(Encoding::FP32),
                RequiredFormat::Nvfp4Mul => Decision::of(Encoding::NVFP4_MUL),
            };
            used.extend(decision.rule);
            if let Some(layer) = parameter.layer {
                places.entry((layer, parameter.role)).or_default().push(waiting.len());
            }
            let source = quantized.get(&parameter.name).copied();
            let given = parameter
                .input
                .as_ref()
                .and_then(|input| activation_divisors.get(input))
                .copied();
            waiting.push(Some(Planned {
                activation_divisor: given.or(source.and_then(|source| source.activation_divisor)),
                parameter,
                decision,
                source,
            }));
        }
        Self {
            waiting,
            places,
            parents: Vec::new(),
            shared: Vec::new(),
            policies: HashMap::new(),
            activation_divisors: HashMap::new(),
            fallback: recipe.fallback(),
            separate_control: recipe.separates_control(),
            fallen: BTreeMap::new(),
            requantized: BTreeMap::new(),
            imported: 0,
            withheld: 0,
            idle_rules: recipe.without_effect(&used),
            banks: if recipe.packs_experts() { 0 } else { banks },
        }
    }

    fn pack_groups(&mut self, layers: usize) -> Result<(), ConvertError> {
        for layer in 0..layers {
            for group in GROUPS {
                if !(self.separate_control && *group == CONTROL_GROUP) {
                    self.pack(layer, group)?;
                }
            }
        }
        Ok(())
    }

    /// Packs the group if all members are waiting, alike, and fit as one matrix.
    fn pack(&mut self, layer: usize, group: &[&'static str]) -> Result<(), ConvertError> {
        let mut members: Vec<usize> = group
            .iter()
            .filter_map(|role| self.places.get(&(layer, *role)))
            .flatten()
            .copied()
            .collect();
        // The order of declaration is that of the rows in every group: experts one after the other, gate before up.
        members.sort_unstable();
        let waiting: Vec<&Planned> = members
            .iter()
            .filter_map(|index| self.waiting[*index].as_ref())
            .collect();
        if waiting.len() != members.len() || members.len() < 2 {
            return Ok(());
        }
        let first = waiting[0];
        if !waiting.iter().all(|planned| planned.kind() == first.kind()) {
            return Ok(());
        }
        let rows = waiting.iter().try_fold(0u64, |rows, planned| {
            rows.checked_add(planned.parameter.shape[0] as u64)
        });
        let rows = rows.ok_or(ConvertError::Overflow {
            what: "the rows of a packed matrix",
        })?;
        let shape = vec![rows, first.parameter.shape[1] as u64];
        if self.size(first.decision.encoding.format, &shape).is_err() {
            return Ok(());
        }
        let members = members
            .into_iter()
            .filter_map(|index| self.waiting[index].take())
            .collect();
        self.place(members, shape)
    }

    fn place_the_rest(&mut self, tied: bool) -> Result<(), ConvertError> {
        let mut embedding: Option<(Encoding, String)> = None;
        for index in 0..self.waiting.len() {
            let Some(mut planned) = self.waiting[index].take() else {
                continue;
            };
            let shape: Vec<u64> = planned.parameter.shape.iter().map(|extent| *extent as u64).collect();
            let wanted = planned.decision.encoding.format;
            if planned.parameter.role == EXPERT_BANK {
                // There is no other format for a bank.
                self.size(wanted, &shape)?;
            }
            if self.size(wanted, &shape).is_err() {
                let fits = self.size(self.fallback.format, &shape).is_ok();
                planned.decision = Decision::of(if fits { self.fallback } else { Encoding::BF16 });
                let name = format!("{} {shape:?}", planned.parameter.name);
                self.fallen
                    .entry((wanted, planned.decision.encoding.format))
                    .or_insert((0, name))
                    .0 += 1;
            }
            let encoding = planned.decision.encoding;
            match (&embedding, planned.parameter.role) {
                (Some((stored, name)), "output_head") if tied && *stored == encoding => {
                    let stored = name.clone();
                    self.permit(&planned);
                    self.shared.push((planned.parameter, stored));
                    continue;
                }
                (None, "token_embedding") => embedding = Some((encoding, planned.parameter.name.clone())),
                _ => {}
            }
            self.place(vec![planned], shape)?;
        }
        Ok(())
    }

    fn size(&self, format: Format, shape: &[u64]) -> Result<u64, ConvertError> {
        Ok(encoded_size(format, format.layout(), shape, 1)?)
    }

    fn permit(&mut self, planned: &Planned) {
        if planned.parameter.input.is_none() {
            return;
        }
        let (policy, divisor) = planned.permission();
        self.withheld += usize::from(policy != planned.wanted_policy());
        let name = &planned.parameter.name;
        self.policies.insert(name.clone(), policy);
        if let Some(divisor) = divisor {
            self.activation_divisors.insert(name.clone(), divisor);
        }
    }

    fn place(&mut self, members: Vec<Planned>, shape: Vec<u64>) -> Result<(), ConvertError> {
        let encoding = members[0].decision.encoding;
        let imported = members[0].import().is_some();
        for planned in &members {
            self.permit(planned);
            self.imported += usize::from(imported);
            if let (false, Some(source)) = (imported, &planned.source) {
                self.requantized
                    .entry((source.stored, encoding.format))
                    .or_insert((0, planned.parameter.name.clone()))
                    .0 += 1;
            }
        }
        self.parents.push(Parent {
            id: format!("weight/{:06}", self.parents.len()),
            bytes: self.size(encoding.format, &shape)?,
            shape,
            encoding,
            imported,
            members: members.into_iter().map(|planned| planned.parameter).collect(),
        });
        Ok(())
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for ((wanted, got), (count, first)) in &self.fallen {
            notes.push(format!(
                "{count} matrices do not fit {wanted} and are stored as {got}, such as {first}"
            ));
        }
        if self.imported > 0 {
            notes.push(format!("{} matrices keep the words of the source", self.imported));
        }
        for ((stored, got), (count, first)) in &self.requantized {
            notes.push(format!(
                "{count} quantised matrices were decoded and encoded anew, {stored} as {got}, such as {first}"
            ));
        }
        notes.extend(self.idle_rules.iter().cloned());
        if self.banks > 0 {
            notes.push(format!(
                "the routed experts of {} layers are packed as {}, whatever the recipe: a bank has no other format",
                self.banks,
                Format::Nvfp4Mul.name()
            ));
        }
        if self.withheld > 0 {
            notes.push(format!(
                "{} weights would permit 4-bit activations but their inputs have no activation divisor: stored as A16Only",
                self.withheld
            ));
        }
        notes
    }
}
