//! A deterministic share of the windows: shard `i` of `n` scores the windows whose number, counted over all streams in
//! scoring order, is `i` modulo `n`.

use std::fmt;
use std::str::FromStr;

/// Share `index` of `count`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    index: u64,
    count: u64,
}

/// Text that is no share.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a shard is written i/n with 0 <= i < n, such as 0/4; `{0}` is not")]
pub struct ShardError(pub String);

impl Shard {
    /// All windows.
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    /// Whether the window of this number belongs to the share.
    pub fn contains(&self, window: u64) -> bool {
        window % self.count == self.index
    }

    /// Windows of the share among the first `windows`.
    pub fn below(&self, windows: u64) -> u64 {
        windows.saturating_sub(self.index).div_ceil(self.count)
    }

    /// Whether this is everything.
    pub fn is_whole(&self) -> bool {
        self.count == 1
    }

    /// Position of the share.
    pub fn index(&self) -> u64 {
        self.index
    }

    /// Number of shares.
    pub fn count(&self) -> u64 {
        self.count
    }
}

impl Default for Shard {
    fn default() -> Self {
        Self::WHOLE
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

impl FromStr for Shard {
    type Err = ShardError;

    fn from_str(text: &str) -> Result<Self, ShardError> {
        let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit()).then(|| s.parse().ok()).flatten();
        match text.split_once('/').and_then(|(i, n)| Some((digits(i)?, digits(n)?))) {
            Some((index, count)) if index < count => Ok(Self { index, count }),
            _ => Err(ShardError(text.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_window_belongs_to_exactly_one_share() {
        let shards: Vec<Shard> = (0..3).map(|i| format!("{i}/3").parse().unwrap()).collect();
        for window in 0..20 {
            assert_eq!(shards.iter().filter(|s| s.contains(window)).count(), 1);
            for shard in &shards {
                let among = (0..window).filter(|&w| shard.contains(w)).count() as u64;
                assert_eq!(shard.below(window), among);
            }
        }
        assert!(Shard::WHOLE.contains(7) && !shards[0].is_whole());
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["", "1", "3/3", "-1/2", "+1/2", "1/0", "a/b", "1/2/3", "/", "1/"] {
            assert_eq!(text.parse::<Shard>(), Err(ShardError(text.into())));
        }
    }
}
