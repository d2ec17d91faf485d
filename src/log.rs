//! The log on standard error, as a command-line tool prints it: no time stamps, and no prefix at level `info`.

use std::fmt::Display;
use std::sync::{Mutex, MutexGuard, PoisonError};

use clap::ValueEnum;
use perplexity_eval::humanize::printable;

use crate::terminal::Terminal;

/// Importance of a record; a log prints its own level and everything above.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Level {
    Trace,
    Debug,
    Info,
    #[value(alias = "warn")]
    Warning,
    Error,
    #[value(alias = "fatal")]
    Critical,
    Off,
}

/// Records and progress of one run. Safe to use from several threads.
pub(crate) struct Log {
    level: Level,
    terminal: Mutex<Terminal>,
}

impl Log {
    /// A log on standard error that prints `level` and above.
    pub(crate) fn stderr(level: Level) -> Self {
        Self {
            level,
            terminal: Mutex::new(Terminal::stderr(level <= Level::Info)),
        }
    }

    pub(crate) fn debug(&self, message: impl Display) {
        self.record(Level::Debug, "debug: ", &message);
    }

    pub(crate) fn info(&self, message: impl Display) {
        self.record(Level::Info, "", &message);
    }

    pub(crate) fn warning(&self, message: impl Display) {
        self.record(Level::Warning, "warning: ", &message);
    }

    /// Prints an error with its causes on one line.
    pub(crate) fn error(&self, error: &dyn std::error::Error) {
        self.clear_progress();
        self.record(Level::Error, "error: ", &chain(error));
    }

    /// Starts the progress line of a task.
    pub(crate) fn begin_progress(&self, line: &str) {
        if self.level <= Level::Info {
            self.terminal().begin_progress(&printable(line));
        }
    }

    /// Shows progress if it is due: at once on a console, every ten seconds in a file.
    pub(crate) fn progress(&self, line: impl FnOnce() -> String) {
        if self.level <= Level::Info {
            self.terminal().progress(|| printable(&line()));
        }
    }

    /// Whether progress is one line that is redrawn.
    pub(crate) fn on_console(&self) -> bool {
        self.terminal().is_console()
    }

    /// Removes the progress line from a console.
    pub(crate) fn clear_progress(&self) {
        self.terminal().clear();
    }

    fn record(&self, level: Level, prefix: &str, message: &dyn Display) {
        if level >= self.level {
            self.terminal().record(&printable(&format!("{prefix}{message}")));
        }
    }

    fn terminal(&self) -> MutexGuard<'_, Terminal> {
        // A thread that panicked while printing leaves at worst a stale progress line.
        self.terminal.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The message of `error` and of each cause that it does not already quote.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let message = inner.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_ordered_and_have_the_usual_aliases() {
        assert!(Level::Trace < Level::Info && Level::Critical < Level::Off);
        assert_eq!(Level::from_str("warn", false), Ok(Level::Warning));
        assert_eq!(Level::from_str("fatal", false), Ok(Level::Critical));
    }

    #[test]
    fn causes_are_said_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("reading failed: {0}")]
        struct Outer(#[source] std::num::ParseIntError);
        let inner = "x".parse::<u8>().unwrap_err();
        assert_eq!(chain(&Outer(inner)), "reading failed: invalid digit found in string");
    }
}
