//! Routed experts in packed banks: where they are ([`ExpertBank`]), how they are multiplied exactly ([`arithmetic`]), and
//! which of them are kept ready ([`ExpertStore`]).

pub mod arithmetic;
mod bank;
mod error;
mod store;

pub use bank::ExpertBank;
pub use error::ExpertError;
pub use store::{CacheStatistics, ExpertStore, Ready, Residency};
