//! Routed experts in packed banks: where they are ([`ExpertBank`]), how they are multiplied exactly ([`arithmetic`]), and
//! which of them are kept ready ([`ExpertStore`]), on a device that multiplies records ([`DeviceExperts`]).

pub mod arithmetic;
mod bank;
mod device;
mod error;
mod store;

pub use bank::ExpertBank;
pub use device::DeviceExperts;
pub use error::ExpertError;
pub use store::{CacheStatistics, ExpertStore, Ready, Residency};
