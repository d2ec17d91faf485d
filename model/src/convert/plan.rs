//! Which objects an artifact will hold: parameters packed into parents, sizes and offsets, permissions.
//!
//! Parameters that one projection of the same activation reads are stored as one matrix, row blocks in a fixed order, if
//! they have the same encoding; otherwise smaller groups are tried, then single objects. Packed groups come first, block
//! by block, then everything else in declaration order. The arithmetic needs shapes only.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::ConvertError;
use super::recipe::{Encoding, Recipe};
use crate::config::TextConfig;
use crate::formats::{Format, encoded_size};
use crate::parameters::{Parameter, RequiredFormat, parameters};
use crate::source::ActivationPolicy;

/// Row blocks of a parent, by role, in order; of several groups with common members the first that fits is taken.
const GROUPS: [&[&str]; 12] = [
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
    /// Encoded size in bytes.
    pub bytes: u64,
    /// The parameters in it, in order of their elements.
    pub members: Vec<Parameter>,
}

/// The objects of an artifact, in the order they are written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Tensor objects.
    pub parents: Vec<Parent>,
    /// Parameters that share the object of another one: name, and the name of the one that is stored.
    pub shared: Vec<(Parameter, String)>,
    /// Activation permission of every parameter that multiplies an activation.
    pub policies: HashMap<String, ActivationPolicy>,
    /// What differs from the recipe, in words.
    pub notes: Vec<String>,
}

impl Plan {
    /// Plans an artifact of `config` by `recipe`. Four-bit activations are permitted only at inputs that have an entry
    /// in `activation_divisors`.
    ///
    /// # Errors
    /// When a size overflows.
    pub fn new(
        config: &TextConfig,
        recipe: &Recipe,
        activation_divisors: &BTreeMap<String, f32>,
    ) -> Result<Self, ConvertError> {
        let mut planner = Planner::new(config, recipe);
        planner.pack_groups(config.layer_types.len())?;
        planner.place_the_rest(config.tie_word_embeddings)?;
        let mut notes = planner.notes();
        let policies = planner.policies(activation_divisors, &mut notes);
        Ok(Self {
            parents: planner.parents,
            shared: planner.shared,
            policies,
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
        let elements = |shape: &[u64]| shape.iter().map(|extent| *extent as f64).product::<f64>();
        let (bits, weights) = self.parents.iter().fold((0.0, 0.0), |(bits, weights), parent| {
            (bits + 8.0 * parent.bytes as f64, weights + elements(&parent.shape))
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
    permitted: Vec<(String, String, ActivationPolicy)>,
    fallback: Encoding,
    separate_control: bool,
    /// Parameters that did not fit their format, by format and what they got: how many, and the first.
    fallen: BTreeMap<(Format, Format), (usize, String)>,
    idle_rules: Vec<String>,
}

struct Planned {
    parameter: Parameter,
    encoding: Encoding,
    policy: ActivationPolicy,
}

impl Planner {
    fn new(config: &TextConfig, recipe: &Recipe) -> Self {
        let mut waiting = Vec::new();
        let mut used = HashSet::new();
        let mut places: HashMap<_, Vec<usize>> = HashMap::new();
        for parameter in parameters(config) {
            let (encoding, policy) = match parameter.format {
                RequiredFormat::Any => {
                    let (encoding, policy, rule) = recipe.decide(parameter.role, parameter.layer);
                    used.extend(rule);
                    (encoding, policy)
                }
                RequiredFormat::Bf16 => (Encoding::BF16, ActivationPolicy::A16Only),
                RequiredFormat::Fp32 => (Encoding::FP32, ActivationPolicy::A16Only),
            };
            if let Some(layer) = parameter.layer {
                places.entry((layer, parameter.role)).or_default().push(waiting.len());
            }
            waiting.push(Some(Planned {
                parameter,
                encoding,
                policy,
            }));
        }
        Self {
            waiting,
            places,
            parents: Vec::new(),
            shared: Vec::new(),
            permitted: Vec::new(),
            fallback: recipe.fallback(),
            separate_control: recipe.separates_control(),
            fallen: BTreeMap::new(),
            idle_rules: recipe.without_effect(&used),
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
        let columns = first.parameter.shape[1];
        let alike = |planned: &&Planned| planned.encoding == first.encoding && planned.parameter.shape[1] == columns;
        if !waiting.iter().all(alike) {
            return Ok(());
        }
        let rows = waiting.iter().try_fold(0u64, |rows, planned| {
            rows.checked_add(planned.parameter.shape[0] as u64)
        });
        let rows = rows.ok_or(ConvertError::Overflow {
            what: "the rows of a packed matrix",
        })?;
        let shape = vec![rows, columns as u64];
        if self.size(first.encoding.format, &shape).is_err() {
            return Ok(());
        }
        let encoding = first.encoding;
        let members = members
            .into_iter()
            .filter_map(|index| self.waiting[index].take())
            .collect();
        self.place(members, shape, encoding)
    }

    fn place_the_rest(&mut self, tied: bool) -> Result<(), ConvertError> {
        let mut embedding: Option<(Encoding, String)> = None;
        for index in 0..self.waiting.len() {
            let Some(mut planned) = self.waiting[index].take() else {
                continue;
            };
            let shape: Vec<u64> = planned.parameter.shape.iter().map(|extent| *extent as u64).collect();
            if self.size(planned.encoding.format, &shape).is_err() {
                let wanted = planned.encoding.format;
                planned.policy = ActivationPolicy::A16Only;
                planned.encoding = if self.size(self.fallback.format, &shape).is_ok() {
                    self.fallback
                } else {
                    Encoding::BF16
                };
                let name = format!("{} {shape:?}", planned.parameter.name);
                self.fallen
                    .entry((wanted, planned.encoding.format))
                    .or_insert((0, name))
                    .0 += 1;
            }
            match (&embedding, planned.parameter.role) {
                (Some((encoding, name)), "output_head") if tied && *encoding == planned.encoding => {
                    let stored = name.clone();
                    self.permit(&planned);
                    self.shared.push((planned.parameter, stored));
                    continue;
                }
                (None, "token_embedding") => embedding = Some((planned.encoding, planned.parameter.name.clone())),
                _ => {}
            }
            let encoding = planned.encoding;
            self.place(vec![planned], shape, encoding)?;
        }
        Ok(())
    }

    fn size(&self, format: Format, shape: &[u64]) -> Result<u64, ConvertError> {
        Ok(encoded_size(format, format.layout(), shape, 1)?)
    }

    fn permit(&mut self, planned: &Planned) {
        if let Some(input) = &planned.parameter.input {
            self.permitted
                .push((planned.parameter.name.clone(), input.clone(), planned.policy));
        }
    }

    fn place(&mut self, members: Vec<Planned>, shape: Vec<u64>, encoding: Encoding) -> Result<(), ConvertError> {
        members.iter().for_each(|planned| self.permit(planned));
        self.parents.push(Parent {
            id: format!("weight/{:06}", self.parents.len()),
            bytes: self.size(encoding.format, &shape)?,
            shape,
            encoding,
            members: members.into_iter().map(|planned| planned.parameter).collect(),
        });
        Ok(())
    }

    fn notes(&self) -> Vec<String> {
        let note = |((wanted, got), (count, first)): (&(Format, Format), &(usize, String))| {
            format!("{count} matrices do not fit {wanted} and are stored as {got}, such as {first}")
        };
        self.fallen
            .iter()
            .map(note)
            .chain(self.idle_rules.iter().cloned())
            .collect()
    }

    fn policies(&self, divisors: &BTreeMap<String, f32>, notes: &mut Vec<String>) -> HashMap<String, ActivationPolicy> {
        let mut withheld = 0usize;
        let resolve = |(name, input, policy): &(String, String, ActivationPolicy)| {
            let lacks = *policy == ActivationPolicy::AllowA4 && !divisors.contains_key(input);
            withheld += usize::from(lacks);
            (name.clone(), if lacks { ActivationPolicy::A16Only } else { *policy })
        };
        let policies = self.permitted.iter().map(resolve).collect();
        if withheld > 0 {
            notes.push(format!(
                "{withheld} weights would permit 4-bit activations but their inputs have no activation divisor: \
                 stored as A16Only"
            ));
        }
        policies
    }
}
