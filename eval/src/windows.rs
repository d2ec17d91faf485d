//! Window plans: which tokens are fed and which are scored.
//!
//! For a stream `x[0..N)` a window feeds `x[input_begin..input_end)` and scores `x[i]` given `x[input_begin..i)` for `i`
//! in `[target_begin, target_end)`; `target_end == input_end`. With context `c` and stride `s`:
//!
//! - **sliding**: the first window is `[0, min(N, c))` with targets from 1; each later one continues at the previous end
//!   `p` with `e = min(N, p + s)` and `b = e - c`. Every token but `x[0]` is scored exactly once. The last window keeps
//!   its full length, so it can have more than `c - s` tokens of context.
//! - **disjoint**: `[k·c, (k+1)·c)`, scored from the second token on; a partial tail is dropped.
//! - **llama.cpp chunks**: as disjoint, at least two, and only local targets `[c/2 + 1, c)` are scored.
//!
//! A plan computes its windows on demand, so it takes no memory however small the stride.

use serde::{Deserialize, Serialize};

/// How a stream is cut into windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WindowKind {
    /// Overlapping windows; every token but the first is scored once.
    Sliding,
    /// Back-to-back windows, each scored from its second token on.
    Disjoint,
    /// Back-to-back windows, each scored in its second half, as `llama-perplexity` does.
    LlamaChunks,
}

impl WindowKind {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sliding => "sliding",
            Self::Disjoint => "disjoint",
            Self::LlamaChunks => "llama-chunks",
        }
    }
}

/// Why no plan exists.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WindowError {
    /// The context cannot hold a predictor and a target.
    #[error("context must be at least {minimum} tokens, not {context}")]
    Context {
        /// Smallest context of the window kind.
        minimum: usize,
        /// The context asked for.
        context: usize,
    },
    /// The stride would skip or repeat targets.
    #[error("stride must be at least 1 and less than the context of {context} tokens, not {stride}")]
    Stride {
        /// The context.
        context: usize,
        /// The stride asked for.
        stride: usize,
    },
    /// Nothing can be predicted from fewer than two tokens.
    #[error("a text of {tokens} token(s) has no token to predict; at least 2 are needed")]
    TooShort {
        /// Tokens in the stream.
        tokens: usize,
    },
    /// Back-to-back windows need full windows.
    #[error(
        "a text of {tokens} tokens is shorter than {windows} window(s) of {context}; use a smaller context or \
         sliding windows"
    )]
    ShorterThanWindow {
        /// Tokens in the stream.
        tokens: usize,
        /// Windows needed.
        windows: usize,
        /// The context.
        context: usize,
    },
    /// A limit on the number of windows cannot be met.
    #[error("the first {asked} window(s) were asked for, but the text has {planned}; ask for 1 to {planned}")]
    Limit {
        /// Windows asked for.
        asked: usize,
        /// Windows planned.
        planned: usize,
    },
}

/// Window kind, context and stride: the protocol two runs must share to be comparable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Protocol {
    kind: WindowKind,
    context: usize,
    stride: usize,
}

impl Protocol {
    /// Checks the ranges. Only sliding windows have a stride; the others record the context as their stride.
    ///
    /// # Errors
    /// When context or stride is out of range.
    pub fn new(kind: WindowKind, context: usize, stride: usize) -> Result<Self, WindowError> {
        // A chunk of four tokens is the smallest with a scored second half that has context.
        let minimum = if kind == WindowKind::LlamaChunks { 4 } else { 2 };
        if context < minimum {
            return Err(WindowError::Context { minimum, context });
        }
        if kind != WindowKind::Sliding {
            return Ok(Self {
                kind,
                context,
                stride: context,
            });
        }
        if stride == 0 || stride >= context {
            return Err(WindowError::Stride { context, stride });
        }
        Ok(Self { kind, context, stride })
    }

    /// How streams are cut.
    pub fn kind(&self) -> WindowKind {
        self.kind
    }

    /// Longest input in tokens.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Targets per later window; equals the context unless windows slide.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Plans a stream of `tokens` tokens.
    ///
    /// # Errors
    /// When the stream is too short.
    pub fn plan(&self, tokens: usize) -> Result<WindowPlan, WindowError> {
        let c = self.context;
        let windows = match self.kind {
            WindowKind::Sliding if tokens < 2 => return Err(WindowError::TooShort { tokens }),
            WindowKind::Sliding if tokens <= c => 1,
            WindowKind::Sliding => 1 + (tokens - c).div_ceil(self.stride),
            WindowKind::Disjoint | WindowKind::LlamaChunks => {
                let needed = if self.kind == WindowKind::LlamaChunks { 2 } else { 1 };
                if tokens / c < needed {
                    return Err(WindowError::ShorterThanWindow {
                        tokens,
                        windows: needed,
                        context: c,
                    });
                }
                tokens / c
            }
        };
        Ok(WindowPlan {
            protocol: *self,
            tokens,
            windows,
        })
    }
}

/// A window: half-open ranges of token indices in its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// First token fed.
    pub input_begin: usize,
    /// End of the input; the last token is a target only.
    pub input_end: usize,
    /// First scored token.
    pub target_begin: usize,
}

impl Window {
    /// End of the scored tokens.
    pub fn target_end(&self) -> usize {
        self.input_end
    }

    /// Index of the first scored token within the input.
    pub fn first_target(&self) -> usize {
        self.target_begin - self.input_begin
    }

    /// Scored tokens.
    pub fn positions(&self) -> usize {
        self.input_end - self.target_begin
    }

    /// Input length in tokens.
    pub fn input_tokens(&self) -> usize {
        self.input_end - self.input_begin
    }
}

/// The windows of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowPlan {
    protocol: Protocol,
    tokens: usize,
    windows: usize,
}

impl WindowPlan {
    /// Number of windows, at least one.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.windows
    }

    /// Window `index`.
    ///
    /// # Panics
    /// When `index` is not below [`len`](Self::len).
    pub fn window(&self, index: usize) -> Window {
        assert!(index < self.windows, "window {index} of {}", self.windows);
        let Protocol {
            kind,
            context: c,
            stride: s,
        } = self.protocol;
        match kind {
            WindowKind::Sliding if index == 0 => Window {
                input_begin: 0,
                input_end: self.tokens.min(c),
                target_begin: 1,
            },
            WindowKind::Sliding => {
                let target_begin = c + (index - 1) * s;
                let input_end = self.tokens.min(target_begin + s);
                Window {
                    input_begin: input_end - c,
                    input_end,
                    target_begin,
                }
            }
            WindowKind::Disjoint | WindowKind::LlamaChunks => {
                let first_target = if kind == WindowKind::Disjoint { 1 } else { c / 2 + 1 };
                let input_begin = index * c;
                Window {
                    input_begin,
                    input_end: input_begin + c,
                    target_begin: input_begin + first_target,
                }
            }
        }
    }

    /// All windows in order.
    pub fn iter(&self) -> impl Iterator<Item = Window> + '_ {
        (0..self.windows).map(|i| self.window(i))
    }

    /// Scored tokens of all windows.
    pub fn scored_tokens(&self) -> usize {
        match self.protocol.kind {
            WindowKind::Sliding => self.window(self.windows - 1).target_end() - 1,
            WindowKind::Disjoint | WindowKind::LlamaChunks => self.windows * self.window(0).positions(),
        }
    }

    /// Keeps the first `windows` windows.
    ///
    /// # Errors
    /// When `windows` is 0 or exceeds the number planned.
    pub fn first(self, windows: usize) -> Result<Self, WindowError> {
        if windows == 0 || windows > self.windows {
            return Err(WindowError::Limit {
                asked: windows,
                planned: self.windows,
            });
        }
        Ok(Self { windows, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `(input_begin, input_end, target_begin, first_target)` of every window.
    fn plan(kind: WindowKind, n: usize, c: usize, s: usize) -> Result<Vec<(usize, usize, usize, usize)>, WindowError> {
        let plan = Protocol::new(kind, c, s)?.plan(n)?;
        Ok(plan
            .iter()
            .map(|w| (w.input_begin, w.input_end, w.target_begin, w.first_target()))
            .collect())
    }

    fn sliding(n: usize, c: usize, s: usize) -> Vec<(usize, usize, usize, usize)> {
        plan(WindowKind::Sliding, n, c, s).unwrap()
    }

    #[test]
    fn sliding_windows_match_the_worked_examples() {
        assert_eq!(sliding(2, 4096, 2048), [(0, 2, 1, 1)]);
        assert_eq!(sliding(5, 6, 2), [(0, 5, 1, 1)]);
        assert_eq!(sliding(6, 6, 2), [(0, 6, 1, 1)]);
        assert_eq!(sliding(7, 6, 2), [(0, 6, 1, 1), (1, 7, 6, 5)]);
        assert_eq!(sliding(9, 6, 2), [(0, 6, 1, 1), (2, 8, 6, 4), (3, 9, 8, 5)]);
        assert_eq!(sliding(10, 6, 2), [(0, 6, 1, 1), (2, 8, 6, 4), (4, 10, 8, 4)]);
        assert_eq!(
            sliding(10, 6, 1),
            [(0, 6, 1, 1), (1, 7, 6, 5), (2, 8, 7, 5), (3, 9, 8, 5), (4, 10, 9, 5)]
        );
        assert_eq!(sliding(11, 6, 5), [(0, 6, 1, 1), (5, 11, 6, 1)]);
        assert_eq!(sliding(4097, 4096, 2048), [(0, 4096, 1, 1), (1, 4097, 4096, 4095)]);
        let long = sliding(12001, 4096, 2048);
        assert_eq!((long.len(), long[4]), (5, (7905, 12001, 10240, 2335)));
        assert_eq!(
            (sliding(65536, 4096, 2048).len(), sliding(65536, 65536, 32768).len()),
            (31, 1)
        );
        // 20 tokens, window 10, stride 5.
        assert_eq!(sliding(20, 10, 5), [(0, 10, 1, 1), (5, 15, 10, 5), (10, 20, 15, 5)]);
    }

    #[test]
    fn disjoint_windows_drop_the_tail() {
        assert_eq!(
            plan(WindowKind::Disjoint, 10, 4, 0).unwrap(),
            [(0, 4, 1, 1), (4, 8, 5, 1)]
        );
        let error = plan(WindowKind::Disjoint, 3, 4, 0).unwrap_err();
        assert_eq!(
            error,
            WindowError::ShorterThanWindow {
                tokens: 3,
                windows: 1,
                context: 4
            }
        );
        // The stride is neither used nor checked, and is recorded as the context.
        assert_eq!(Protocol::new(WindowKind::Disjoint, 2048, 2048).unwrap().stride(), 2048);
    }

    #[test]
    fn llama_chunks_score_the_second_half() {
        assert_eq!(
            plan(WindowKind::LlamaChunks, 17, 8, 0).unwrap(),
            [(0, 8, 5, 5), (8, 16, 13, 5)]
        );
        assert_eq!(
            plan(WindowKind::LlamaChunks, 10, 5, 0).unwrap(),
            [(0, 5, 3, 3), (5, 10, 8, 3)]
        );
        assert!(matches!(
            plan(WindowKind::LlamaChunks, 15, 8, 0),
            Err(WindowError::ShorterThanWindow { windows: 2, .. })
        ));
    }

    #[test]
    fn a_limit_keeps_the_first_windows() {
        let plan = Protocol::new(WindowKind::Sliding, 6, 2).unwrap().plan(10).unwrap();
        let first = plan.first(2).unwrap();
        assert_eq!((first.len(), first.scored_tokens()), (2, 7));
        for asked in [0, 4] {
            assert_eq!(plan.first(asked).unwrap_err(), WindowError::Limit { asked, planned: 3 });
        }
    }

    #[test]
    fn short_texts_are_refused_in_words() {
        for n in [0, 1] {
            let message = plan(WindowKind::Sliding, n, 6, 2).unwrap_err().to_string();
            assert_eq!(
                message,
                format!("a text of {n} token(s) has no token to predict; at least 2 are needed")
            );
        }
    }

    #[test]
    fn context_and_stride_are_checked() {
        for kind in [WindowKind::Sliding, WindowKind::Disjoint] {
            assert_eq!(
                Protocol::new(kind, 1, 1).unwrap_err(),
                WindowError::Context { minimum: 2, context: 1 }
            );
        }
        assert!(Protocol::new(WindowKind::LlamaChunks, 3, 1).is_err());
        for stride in [0, 6, 7] {
            let error = Protocol::new(WindowKind::Sliding, 6, stride).unwrap_err();
            assert_eq!(error, WindowError::Stride { context: 6, stride });
        }
    }

    /// The loop the closed form stands for.
    fn sliding_by_loop(n: usize, c: usize, s: usize) -> Vec<Window> {
        let mut windows = vec![Window {
            input_begin: 0,
            input_end: n.min(c),
            target_begin: 1,
        }];
        let mut p = n.min(c);
        while p < n {
            let e = n.min(p + s);
            windows.push(Window {
                input_begin: e.saturating_sub(c),
                input_end: e,
                target_begin: p,
            });
            p = e;
        }
        windows
    }

    proptest! {
        #[test]
        fn sliding_windows_cover_every_target_once(n in 2usize..400, c in 2usize..60, s in 1usize..60) {
            prop_assume!(s < c);
            let plan = Protocol::new(WindowKind::Sliding, c, s).unwrap().plan(n).unwrap();
            let windows: Vec<_> = plan.iter().collect();
            prop_assert_eq!(&windows, &sliding_by_loop(n, c, s));
            let mut next = 1;
            for window in &windows {
                prop_assert_eq!(window.target_begin, next);
                prop_assert!(window.input_tokens() <= c && window.first_target() >= 1 && window.positions() >= 1);
                next = window.target_end();
            }
            prop_assert_eq!(next, n);
            prop_assert_eq!(plan.scored_tokens(), n - 1);
        }

        #[test]
        fn back_to_back_windows_never_overlap(n in 8usize..400, c in 4usize..60, llama in any::<bool>()) {
            prop_assume!(n / c >= 2);
            let kind = if llama { WindowKind::LlamaChunks } else { WindowKind::Disjoint };
            let plan = Protocol::new(kind, c, 0).unwrap().plan(n).unwrap();
            let scored: usize = plan.iter().map(|w| w.positions()).sum();
            prop_assert_eq!(plan.scored_tokens(), scored);
            prop_assert_eq!(plan.len(), n / c);
            for (k, window) in plan.iter().enumerate() {
                prop_assert_eq!((window.input_begin, window.input_end), (k * c, (k + 1) * c));
                prop_assert_eq!(window.positions(), if llama { c - 1 - c / 2 } else { c - 1 });
            }
        }
    }
}
