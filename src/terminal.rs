//! Standard error as a terminal or a file: records, and one transient line that is redrawn below them.
//!
//! On a terminal the transient line is erased before a record and drawn again after it. Redirected output gets neither
//! carriage returns nor escapes.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Redraws of the transient line are at least this far apart: faster cannot be read.
const REDRAW_EVERY: Duration = Duration::from_millis(200);
/// A redirected run reports progress this often.
const RECORD_EVERY: Duration = Duration::from_secs(10);
/// Assumed when the terminal does not tell its width.
const DEFAULT_WIDTH: usize = 80;
/// Back to the first column and erase to the end of the line.
const ERASE: &str = "\r\x1b[K";

/// Where log records and progress go.
pub(crate) struct Terminal {
    out: Box<dyn Write + Send>,
    /// Columns of a console; `None` when the output is redirected.
    width: Option<fn() -> usize>,
    transient: String,
    last_progress: Instant,
}

impl Terminal {
    /// Standard error. `interactive` allows the transient line when standard error is a console.
    pub(crate) fn stderr(interactive: bool) -> Self {
        let console = interactive && std::io::stderr().is_terminal();
        Self::new(
            Box::new(std::io::stderr()),
            console.then_some(console_width as fn() -> usize),
        )
    }

    fn new(out: Box<dyn Write + Send>, width: Option<fn() -> usize>) -> Self {
        Self {
            out,
            width,
            transient: String::new(),
            last_progress: Instant::now(),
        }
    }

    /// Whether there is a console to redraw a line on.
    pub(crate) fn is_console(&self) -> bool {
        self.width.is_some()
    }

    /// Prints one line that stays.
    pub(crate) fn record(&mut self, line: &str) {
        let text = if self.transient.is_empty() {
            format!("{line}\n")
        } else {
            format!("{ERASE}{line}\n{}", self.transient)
        };
        self.write(&text);
    }

    /// Starts a task's progress: the line is shown at once on a console, and the ten seconds begin.
    pub(crate) fn begin_progress(&mut self, line: &str) {
        self.last_progress = Instant::now();
        if self.width.is_some() {
            self.draw(line);
        }
    }

    /// Shows progress if it is due. `line` is built only then.
    pub(crate) fn progress(&mut self, line: impl FnOnce() -> String) {
        let every = if self.width.is_some() {
            REDRAW_EVERY
        } else {
            RECORD_EVERY
        };
        if self.last_progress.elapsed() < every {
            return;
        }
        self.last_progress = Instant::now();
        let line = line();
        if self.width.is_some() {
            self.draw(&line);
        } else {
            self.record(&line);
        }
    }

    /// Removes the transient line.
    pub(crate) fn clear(&mut self) {
        if !std::mem::take(&mut self.transient).is_empty() {
            self.write(ERASE);
        }
    }

    fn draw(&mut self, line: &str) {
        let columns = self.width.map_or(DEFAULT_WIDTH, |width| width());
        // The last column stays free: writing it wraps the cursor on some consoles.
        self.transient = line.chars().take(columns.saturating_sub(1)).collect();
        let text = format!("{ERASE}{}", self.transient);
        self.write(&text);
    }

    fn write(&mut self, text: &str) {
        // A closed standard error must not stop a run whose result goes elsewhere.
        let _ = self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush());
    }
}

fn console_width() -> usize {
    let size = terminal_size::terminal_size_of(std::io::stderr());
    size.map_or(DEFAULT_WIDTH, |(terminal_size::Width(columns), _)| usize::from(columns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Sink {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    fn rewind(terminal: &mut Terminal, by: Duration) {
        terminal.last_progress = Instant::now().checked_sub(by).unwrap();
    }

    #[test]
    fn a_record_is_printed_above_the_transient_line() {
        let sink = Sink::default();
        let mut terminal = Terminal::new(Box::new(sink.clone()), Some(|| 80));
        terminal.begin_progress("half done");
        terminal.record("a warning");
        terminal.clear();
        terminal.clear();
        terminal.record("end");
        assert_eq!(
            sink.text(),
            "\r\x1b[Khalf done\r\x1b[Ka warning\nhalf done\r\x1b[Kend\n"
        );
    }

    #[test]
    fn the_transient_line_leaves_the_last_column_free() {
        let sink = Sink::default();
        let mut terminal = Terminal::new(Box::new(sink.clone()), Some(|| 6));
        terminal.begin_progress("漢字を数える行");
        assert_eq!(sink.text(), "\r\x1b[K漢字を数え");
    }

    #[test]
    fn a_console_is_redrawn_at_a_readable_rate() {
        let sink = Sink::default();
        let mut terminal = Terminal::new(Box::new(sink.clone()), Some(|| 80));
        terminal.begin_progress("0");
        terminal.progress(|| unreachable!("too soon"));
        rewind(&mut terminal, REDRAW_EVERY);
        terminal.progress(|| "1".into());
        assert_eq!(sink.text(), "\r\x1b[K0\r\x1b[K1");
    }

    #[test]
    fn redirected_progress_is_a_plain_line_every_ten_seconds() {
        let sink = Sink::default();
        let mut terminal = Terminal::new(Box::new(sink.clone()), None);
        terminal.begin_progress("0");
        rewind(&mut terminal, Duration::from_secs(9));
        terminal.progress(|| unreachable!("too soon"));
        rewind(&mut terminal, Duration::from_secs(10));
        terminal.progress(|| "1".into());
        terminal.progress(|| unreachable!("the deadline starts again"));
        terminal.clear();
        assert_eq!(sink.text(), "1\n");
    }
}
