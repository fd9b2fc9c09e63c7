//! The one module that knows how libibverbs looks: its types, and where its functions are.
//!
//! Everything else in this crate goes through [`Functions`] and the types re-exported here, so another
//! binding can take the place of this one.

// What the generator writes is C's naming and C's whole surface, most of it reached through pointers.
#[allow(
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    non_snake_case,
    unreachable_pub,
    dead_code,
    clippy::all
)]
pub(crate) mod bindings;
mod functions;

pub(crate) use functions::{Functions, library};

/// An all-zero value of a C struct, which is what these structs' own users start from.
///
/// # Safety
///
/// All-zero bytes must be a value of `T`: integers, raw pointers, `Option`s of functions, and structs
/// and unions of them.
pub(crate) unsafe fn zeroed<T>() -> T {
    // SAFETY: the caller's promise.
    unsafe { std::mem::zeroed() }
}

/// The error that the last failed call of this thread left.
pub(crate) fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// What a verb that answers with a number means: 0 is done, anything else is an `errno`. Old providers
/// answer -1 and set `errno`, some answer `-errno`.
pub(crate) fn check(answer: i32) -> Result<(), i32> {
    match answer {
        0 => Ok(()),
        -1 => Err(last_errno()),
        n => Err(n.abs()),
    }
}
