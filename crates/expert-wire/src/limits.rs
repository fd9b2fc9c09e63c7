//! Bounds on everything that the other side can announce, checked before memory is reserved.

/// TCP port of the control connection.
pub const CONTROL_PORT: u16 = 9909;
/// Largest first message (manifest JSON of v1, or the stub): larger ones are refused unread.
pub const MANIFEST_MAX_BYTES: u32 = 16 << 20;
/// Largest payload of one frame, except DATA.
pub const FRAME_MAX_BYTES: u32 = 16 << 20;
/// Largest payload of a frame that a client may send: requests are small.
pub const REQUEST_MAX_BYTES: u32 = 64 << 10;
/// Largest number of bytes that one READ request may ask for.
pub const READ_MAX_BYTES: u32 = 16 << 20;
/// READ requests that a client should have outstanding on one stream at most. The server does not
/// count them: it answers one after the other, and those that it has not taken wait in the socket.
pub const READS_PER_STREAM_MAX: u32 = 1024;
/// Streams that one client may open.
pub const STREAMS_MAX: u32 = 64;
/// MoE layers of one stack; v1 uses the same bound.
pub const LAYERS_MAX: u32 = 4096;
/// Routed experts of one layer.
pub const EXPERTS_MAX: u32 = 65_535;
/// Longest text of an error frame.
pub const ERROR_TEXT_MAX_BYTES: usize = 4096;
/// Rails that v1 can name.
pub const V1_RAILS_MAX: u8 = 8;
/// Rails of one peer.
pub const RAILS_MAX: u8 = 16;
/// Queue pairs that one client may open on one rail.
pub const QPS_PER_RAIL_MAX: u8 = 16;
/// Regions of one rail: what fits one frame.
pub const REGIONS_MAX: u32 = 500_000;
