//! libibverbs, looked up once per process.

use super::bindings::{
    _compat_ibv_port_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device,
    ibv_device_attr, ibv_gid_entry, ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};
use crate::error::RdmaError;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The name that every distribution gives the library.
const LIBRARY: &CStr = c"libibverbs.so.1";

macro_rules! functions {
    ($(
        $(#[$doc:meta])*
        $field:ident = $symbol:literal : $kind:ident fn($($arg:ty),*) $(-> $ret:ty)?;
    )*) => {
        /// Pointers to the library's functions; `Option` where an older library lacks one.
        ///
        /// `post_send`, `poll_cq` and `req_notify_cq` are not here: they are reached through the context's own table.
        pub(crate) struct Functions {
            $($(#[$doc])* pub(crate) $field: functions!(@type $kind fn($($arg),*) $(-> $ret)?),)*
        }

        impl Functions {
            fn find(library: &Library) -> Result<Self, String> {
                Ok(Self { $($field: {
                    let symbol = library.symbol($symbol);
                    functions!(@find $kind $symbol, symbol, fn($($arg),*) $(-> $ret)?)
                },)* })
            }
        }
    };
    (@type required fn($($arg:ty),*) $(-> $ret:ty)?) => { unsafe extern "C" fn($($arg),*) $(-> $ret)? };
    (@type optional fn($($arg:ty),*) $(-> $ret:ty)?) => { Option<unsafe extern "C" fn($($arg),*) $(-> $ret)?> };
    (@find required $name:literal, $symbol:ident, fn($($arg:ty),*) $(-> $ret:ty)?) => {{
        if $symbol.is_null() {
            return Err(format!("it has no function {}; it is too old", $name.to_string_lossy()));
        }
        // SAFETY: the symbol is not null and is the function of this name, which has had this signature in every
        // libibverbs.so.1 (a changed one gets a new symbol version or a new name).
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>($symbol) }
    }};
    (@find optional $name:literal, $symbol:ident, fn($($arg:ty),*) $(-> $ret:ty)?) => {
        // SAFETY: null is `None`; otherwise as for a required function.
        unsafe { std::mem::transmute::<*mut c_void, Option<unsafe extern "C" fn($($arg),*) $(-> $ret)?>>($symbol) }
    };
}

functions! {
    get_device_list = c"ibv_get_device_list": required fn(*mut c_int) -> *mut *mut ibv_device;
    free_device_list = c"ibv_free_device_list": required fn(*mut *mut ibv_device);
    get_device_guid = c"ibv_get_device_guid": required fn(*mut ibv_device) -> u64;
    open_device = c"ibv_open_device": required fn(*mut ibv_device) -> *mut ibv_context;
    close_device = c"ibv_close_device": required fn(*mut ibv_context) -> c_int;
    query_device = c"ibv_query_device": required fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    /// Fills only the first part of the struct; the rest must be zero before.
    query_port = c"ibv_query_port": required fn(*mut ibv_context, u8, *mut _compat_ibv_port_attr) -> c_int;
    get_async_event = c"ibv_get_async_event": required fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
    ack_async_event = c"ibv_ack_async_event": required fn(*mut ibv_async_event);
    alloc_pd = c"ibv_alloc_pd": required fn(*mut ibv_context) -> *mut ibv_pd;
    dealloc_pd = c"ibv_dealloc_pd": required fn(*mut ibv_pd) -> c_int;
    reg_mr = c"ibv_reg_mr": required fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    /// Takes access flags that a kernel may not know, such as relaxed ordering.
    reg_mr_iova2 = c"ibv_reg_mr_iova2": optional fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
    dereg_mr = c"ibv_dereg_mr": required fn(*mut ibv_mr) -> c_int;
    create_comp_channel = c"ibv_create_comp_channel": required fn(*mut ibv_context) -> *mut ibv_comp_channel;
    destroy_comp_channel = c"ibv_destroy_comp_channel": required fn(*mut ibv_comp_channel) -> c_int;
    create_cq = c"ibv_create_cq": required
        fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    destroy_cq = c"ibv_destroy_cq": required fn(*mut ibv_cq) -> c_int;
    get_cq_event = c"ibv_get_cq_event": required
        fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ack_cq_events = c"ibv_ack_cq_events": required fn(*mut ibv_cq, c_uint);
    create_qp = c"ibv_create_qp": required fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    modify_qp = c"ibv_modify_qp": required fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    query_qp = c"ibv_query_qp": required
        fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
    destroy_qp = c"ibv_destroy_qp": required fn(*mut ibv_qp) -> c_int;
    /// All entries of all ports at once, with their types and interfaces.
    query_gid_table = c"_ibv_query_gid_table": optional
        fn(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize;
}

/// The library's functions; the same for the whole process once they were found.
///
/// A library that is missing is looked for again at the next call, so that it can be installed beside a running
/// process. One that was loaded is never unloaded: its providers keep threads and static data.
pub(crate) fn library() -> Result<&'static Functions, RdmaError> {
    static FOUND: OnceLock<Functions> = OnceLock::new();
    static LOOKING: Mutex<()> = Mutex::new(());
    if let Some(functions) = FOUND.get() {
        return Ok(functions);
    }
    let _one_at_a_time = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(functions) = FOUND.get() {
        return Ok(functions);
    }
    let functions = Library::open(LIBRARY)
        .and_then(|library| Functions::find(&library))
        .map_err(|reason| RdmaError::NoLibrary { reason })?;
    Ok(FOUND.get_or_init(|| functions))
}

/// A loaded library; it stays loaded.
struct Library {
    handle: *mut c_void,
}

impl Library {
    fn open(name: &CStr) -> Result<Self, String> {
        // SAFETY: the name is a C string. Loading runs the library's initialisers, which is what is wanted.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(loader_words());
        }
        Ok(Self { handle })
    }

    /// The default version of a symbol; null if there is none.
    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the handle came from dlopen and was never closed; the name is a C string.
        unsafe { libc::dlsym(self.handle, name.as_ptr()) }
    }
}

/// What the loader says of its last failure on this thread.
fn loader_words() -> String {
    // SAFETY: no preconditions; the text belongs to the loader until the next call on this thread.
    let words: *mut c_char = unsafe { libc::dlerror() };
    if words.is_null() {
        return "the loader gave no reason".to_owned();
    }
    // SAFETY: the loader's texts are C strings, and this thread makes no other call before the copy below is done.
    let words = unsafe { CStr::from_ptr(words) };
    words.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named_by_the_loader() {
        let words = Library::open(c"libno-such-verbs.so.1").err().unwrap();
        assert!(words.contains("libno-such-verbs.so.1"), "{words}");
    }

    #[test]
    fn a_library_without_the_verbs_is_called_too_old() {
        let library = Library::open(c"libc.so.6").unwrap();
        let reason = Functions::find(&library).err().unwrap();
        assert!(reason.contains("ibv_get_device_list"), "{reason}");
    }
}
