//! The rails: what moves bytes below the engine.

pub(crate) mod local;
pub(crate) mod socket;
pub(crate) mod tcp;
pub(crate) mod uma;
pub(crate) mod verbs;
