//! One-sided verbs.

pub mod attributes;
pub mod memory;
