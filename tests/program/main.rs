//! The program as its user meets it: the real binary, real files, exit codes and both output streams.

mod common;
mod conversion;
mod demo;
mod help;
mod output;
mod refusals;
mod texts;
