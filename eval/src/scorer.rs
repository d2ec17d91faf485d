//! What the evaluation asks of a model: log-probabilities of independent windows.

use crate::hidden::Precision;

/// One window of a stream, scored from an empty state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WindowTokens {
    /// Input ids; the last one is a target only and is never fed.
    pub tokens: Vec<u32>,
    /// Index of the first scored token; `1 <= first_target < tokens.len()`.
    pub first_target: usize,
}

impl WindowTokens {
    /// Scored positions `P = tokens.len() - first_target`.
    pub fn positions(&self) -> usize {
        self.tokens.len() - self.first_target
    }
}

/// What to return beside the targets' log-probabilities.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScoreRequest {
    /// Most probable tokens per position; 0 for none.
    pub top_k: usize,
    /// Tokens to score per position; 0 for none.
    pub candidates_per_position: usize,
    /// One list per window, position-major, `positions * candidates_per_position` ids each.
    pub candidates: Vec<Vec<u32>>,
    /// Whether to return the final hidden states.
    pub hidden: bool,
}

/// Scores of one window; natural logarithms.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WindowScores {
    /// `logprobs[j]` belongs to `tokens[first_target + j]`.
    pub logprobs: Vec<f32>,
    /// Position-major, most probable first, equal logits in ascending id.
    pub top_ids: Vec<u32>,
    /// The top tokens' log-probabilities, same layout.
    pub top_logprobs: Vec<f32>,
    /// The candidates' log-probabilities, in the order asked.
    pub candidate_logprobs: Vec<f32>,
    /// Final hidden states, `[positions, hidden_size]`; empty unless asked for.
    pub hidden: Vec<f32>,
}

/// A failure inside the model; the message names the operation and the operand at fault.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ScoreError(pub Box<dyn std::error::Error + Send + Sync>);

/// A scored position over the whole vocabulary; log-probabilities `[public_tokens]`.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// Log-probability of the target, the very one that [`CausalScorer::score`] gives.
    pub logprob: f32,
    /// This run's distribution.
    pub run: &'a [f32],
    /// What the output head makes of the reference's hidden state; empty without one.
    pub reference: &'a [f32],
}

/// Takes a position.
pub type RowVisitor<'a> = dyn FnMut(Row<'_>) -> Result<(), ScoreError> + 'a;

/// Another run's final hidden states of a window.
#[derive(Debug, Clone, PartialEq)]
pub struct HiddenStates {
    /// `[positions, hidden_size]`.
    pub values: Vec<f32>,
    /// Precision of the values.
    pub precision: Precision,
    /// Precision that their logits had in that run.
    pub logits: Precision,
}

/// Scores next-token log-probabilities of independent windows, each from an empty state.
pub trait CausalScorer {
    /// Ids the tokenizer can produce; rows of the head at or beyond it take no part in the softmax.
    fn public_tokens(&self) -> usize;

    /// Rows of the head that take part in the softmax; the public ones unless the scorer was told otherwise.
    fn softmax_rows(&self) -> usize {
        self.public_tokens()
    }

    /// Scores each window; the result has one entry per window, in order.
    ///
    /// # Errors
    /// On an invalid request or a failure of the device.
    fn score(&mut self, windows: &[WindowTokens], ask: &ScoreRequest) -> Result<Vec<WindowScores>, ScoreError>;

    /// Values of a final hidden state; `None` when the scorer has none to give.
    fn hidden_size(&self) -> Option<usize> {
        None
    }

    /// Hands over each scored position's whole row of log-probabilities in position order, and beside it the one that the
    /// output head makes of the position's hidden state in `reference`. Only files of whole rows or hidden states need this;
    /// a scorer that cannot do it keeps this body.
    ///
    /// # Errors
    /// When full rows are not available, the device fails, or `row` fails.
    fn score_rows(
        &mut self,
        _window: &WindowTokens,
        _reference: Option<&HiddenStates>,
        _row: &mut RowVisitor<'_>,
    ) -> Result<(), ScoreError> {
        Err(ScoreError(
            "this model does not give full rows of log-probabilities".into(),
        ))
    }
}
