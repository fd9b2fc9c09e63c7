//! A peer that does what a test tells it to, wrong things above all.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use expert_store::codec::Sections;
use expert_store::{Store, StoreInfo};
use expert_wire::frame::FrameKind;
use expert_wire::limits;
use expert_wire::message::{
    CatalogueRequest, ChecksumReport, ErrorCode, ErrorFrame, ReadRequest, ServerHello, VERSION,
    Welcome,
};
use expert_wire::v1::{Greeting, V2Offer};

use super::raw::{frame, read_frame};

/// How a READ is answered.
#[derive(Debug, Clone)]
pub enum Reply {
    /// With its bytes.
    Right,
    /// With its bytes, one of them wrong.
    Corrupt,
    /// With one byte less than asked for.
    Short,
    /// With its bytes, under the id of another READ.
    OtherId,
    /// With so many of its bytes, and then by hanging up.
    CloseAfter(usize),
    /// With so many of its bytes, and then nothing more on this connection.
    StallAfter(usize),
    /// With an error frame.
    Error(ErrorCode),
    /// With these bytes in place of a frame.
    Bytes(Vec<u8>),
    /// With these bytes, and then as it should.
    RightAfter(Vec<u8>),
}

/// Decides on the answer to the `n`-th READ, counted from 0 over all connections.
pub type OnRead = Box<dyn Fn(u64, &ReadRequest) -> Reply + Send + Sync>;
/// Changes the answer to a question for a layer.
pub type OnLayer = Box<dyn Fn(Vec<u8>) -> Vec<u8> + Send + Sync>;

/// Changes what it says that it has.
pub type OnInfo = Box<dyn Fn(StoreInfo) -> StoreInfo + Send + Sync>;

/// A v2 peer on a store, with faults.
pub struct Script {
    /// Where right bytes come from.
    pub store: Arc<Store>,
    /// Sent to every client.
    pub welcome: Welcome,
    /// See [`OnRead`].
    pub on_read: OnRead,
    /// See [`OnLayer`].
    pub on_layer: OnLayer,
    /// See [`OnInfo`].
    pub on_info: OnInfo,
}

impl Script {
    /// Serves a store rightly but for its answers to READs.
    pub fn new(
        store: Arc<Store>,
        on_read: impl Fn(u64, &ReadRequest) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self {
            welcome: Welcome {
                instance_id: 77,
                epoch: 1,
                read_max_bytes: limits::READ_MAX_BYTES,
                generation: store.generation(),
                content_id: store.content_id(),
                layout_id: store.layout_id(),
            },
            store,
            on_read: Box::new(on_read),
            on_layer: Box::new(|blob| blob),
            on_info: Box::new(|info| info),
        }
    }
}

/// See the module. Ends its threads when it is dropped.
pub struct FakePeer {
    addr: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    reads: AtomicU64,
    connections: AtomicU64,
    reports: Mutex<Vec<ChecksumReport>>,
    streams: Mutex<Vec<TcpStream>>,
}

impl FakePeer {
    /// Calls `handle` on a thread of its own for each connection, which ends with it.
    pub fn start(
        handle: impl Fn(&mut TcpStream) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self::run(move |stream, _| handle(stream))
    }

    /// Accepts connections and says nothing.
    pub fn silent() -> Self {
        Self::run(|_, shared| shared.wait_for_stop())
    }

    /// Sends these bytes to everybody, and then nothing.
    pub fn saying(bytes: Vec<u8>) -> Self {
        Self::run(move |stream, shared| {
            stream.write_all(&bytes)?;
            shared.wait_for_stop()
        })
    }

    /// Serves as told.
    pub fn serving(script: Script) -> Self {
        Self::run(move |stream, shared| shared.serve(stream, &script))
    }

    fn run(
        handle: impl Fn(&mut TcpStream, &Shared) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("its address");
        let shared = Arc::new(Shared::default());
        let thread = std::thread::spawn({
            let shared = shared.clone();
            move || shared.accept(&listener, &handle)
        });
        Self {
            addr,
            shared,
            thread: Some(thread),
        }
    }

    /// Where it listens.
    pub fn addr(&self) -> String {
        self.addr.to_string()
    }

    /// Connections so far.
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::SeqCst)
    }

    /// READs so far.
    pub fn reads(&self) -> u64 {
        self.shared.reads.load(Ordering::SeqCst)
    }

    /// Reports of bad chunks so far.
    pub fn reports(&self) -> Vec<ChecksumReport> {
        lock(&self.shared.reports).clone()
    }
}

impl Drop for FakePeer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        // Wakes the acceptor.
        let _ = TcpStream::connect(self.addr);
        for stream in lock(&self.shared.streams).iter() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn accept(
        &self,
        listener: &TcpListener,
        handle: &(impl Fn(&mut TcpStream, &Shared) -> io::Result<()> + Sync),
    ) {
        std::thread::scope(|scope| {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { continue };
                if self.stop.load(Ordering::SeqCst) {
                    break;
                }
                self.connections.fetch_add(1, Ordering::SeqCst);
                let _ = stream.set_nodelay(true);
                lock(&self.streams).extend(stream.try_clone());
                scope.spawn(move || {
                    // Clients hang up on faults: that is what they are for.
                    let _ = handle(&mut stream, self);
                    let _ = stream.shutdown(Shutdown::Both);
                });
            }
            for stream in lock(&self.streams).iter() {
                let _ = stream.shutdown(Shutdown::Both);
            }
        });
    }

    fn wait_for_stop(&self) -> io::Result<()> {
        while !self.stop.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn serve(&self, stream: &mut TcpStream, script: &Script) -> io::Result<()> {
        let greeting = Greeting {
            manifest: None,
            v2: Some(V2Offer {
                versions: vec![VERSION],
                instance_id: script.welcome.instance_id,
                capabilities: vec![],
                refused: None,
            }),
        };
        stream.write_all(&greeting.encode())?;
        stream.read_exact(&mut [0])?;
        read_frame(stream, limits::REQUEST_MAX_BYTES)?;
        let hello = ServerHello {
            version: VERSION,
            auth: 0,
            instance_id: script.welcome.instance_id,
        };
        stream.write_all(&frame(FrameKind::ServerHello, 0, &hello.encode()))?;
        stream.write_all(&frame(FrameKind::Welcome, 0, &script.welcome.encode()))?;
        loop {
            let (header, payload) = read_frame(stream, limits::REQUEST_MAX_BYTES)?;
            let answer = match header.kind {
                FrameKind::StoreInfo => {
                    let json = serde_json::to_vec(&(script.on_info)(script.store.info().clone()))?;
                    frame(FrameKind::StoreInfoReply, header.id, &json)
                }
                FrameKind::Catalogue => {
                    let request = CatalogueRequest::decode(&payload).map_err(io::Error::other)?;
                    let sections = Sections::from_bits(request.sections);
                    let blob = script.store.layer_blob(request.layer, sections);
                    let blob = (script.on_layer)(blob.expect("a layer of the store"));
                    frame(FrameKind::CatalogueReply, header.id, &blob)
                }
                FrameKind::Read => {
                    let request = ReadRequest::decode(&payload).map_err(io::Error::other)?;
                    self.answer(stream, script, header.id, &request)?;
                    continue;
                }
                FrameKind::ChecksumReport => {
                    let report = ChecksumReport::decode(&payload).map_err(io::Error::other)?;
                    lock(&self.reports).push(report);
                    continue;
                }
                FrameKind::Pong => continue,
                FrameKind::Ping => frame(FrameKind::Pong, header.id, &payload),
                _ => return Ok(()),
            };
            stream.write_all(&answer)?;
        }
    }

    fn answer(
        &self,
        stream: &mut TcpStream,
        script: &Script,
        id: u64,
        request: &ReadRequest,
    ) -> io::Result<()> {
        let n = self.reads.fetch_add(1, Ordering::SeqCst);
        let reply = (script.on_read)(n, request);
        let mut bytes = vec![0; request.bytes as usize];
        script
            .store
            .read_image(request.key, request.offset, &mut bytes)
            .map_err(io::Error::other)?;
        let data = |id, bytes: &[u8]| frame(FrameKind::Data, id, bytes);
        match reply {
            Reply::Right => stream.write_all(&data(id, &bytes)),
            Reply::Corrupt => {
                let middle = bytes.len() / 2;
                bytes[middle] ^= 0x10;
                stream.write_all(&data(id, &bytes))
            }
            Reply::Short => stream.write_all(&data(id, &bytes[1..])),
            Reply::OtherId => stream.write_all(&data(id + 1, &bytes)),
            Reply::CloseAfter(count) => {
                let whole = data(id, &bytes);
                stream.write_all(&whole[..count.min(whole.len() - 1)])?;
                Err(io::ErrorKind::Other.into())
            }
            Reply::StallAfter(count) => {
                let whole = data(id, &bytes);
                stream.write_all(&whole[..count.min(whole.len() - 1)])?;
                self.wait_for_stop()
            }
            Reply::Error(code) => {
                let error = ErrorFrame::new(code, "as the test wants it");
                stream.write_all(&frame(FrameKind::Error, id, &error.encode()))
            }
            Reply::Bytes(bytes) => stream.write_all(&bytes),
            Reply::RightAfter(first) => {
                stream.write_all(&first)?;
                stream.write_all(&data(id, &bytes))
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
