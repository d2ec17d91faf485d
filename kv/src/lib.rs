//! KV-cache codecs: one file each under `codecs/`.
//!
//! | question | module |
//! |---|---|
//! | what is a codec | [`codec`], [`layout`], [`basis`] |
//! | which are there, what are they called | [`codecs`], [`registry`] |
//! | how does a forward pass use one | [`store`], [`attention`] |
//! | how is a new one written and tested | [`tensor_ops`], [`conformance`] |

mod arith;
pub mod attention;
pub mod basis;
pub mod codec;
pub mod codecs;
pub mod conformance;
pub mod layout;
pub mod options;
pub mod registry;
pub mod store;
pub mod tensor_ops;
pub mod tensor_store;
