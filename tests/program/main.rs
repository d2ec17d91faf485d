//! The program as its user meets it: the real binary, real files, exit codes and both output streams.

mod bench;
mod common;
mod conversion;
mod demo;
mod device;
mod faults;
mod flash_next;
mod guides;
mod help;
mod kv;
mod output;
mod parts;
mod precision;
mod references;
mod refusals;
mod routes;
mod texts;
