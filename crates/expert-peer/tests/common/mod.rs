//! A store over temporary files, and clients that speak the protocol by hand.
#![allow(dead_code, unreachable_pub)] // each test binary uses a part of it

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use expert_peer::{FilePiece, Peer, PeerConfig, Source, SourceError};
use expert_store::stamp::FileStamp;
use expert_wire::frame::{FrameHeader, FrameKind, HEADER_BYTES, push_frame};
use expert_wire::message::{
    ClientHello, ErrorCode, ErrorFrame, ReadRequest, Role, ServerHello, Welcome,
};
use expert_wire::v1::{self, Greeting, Manifest};
use expert_wire::{Key, limits};
use tempfile::TempDir;

pub const LAYERS: u32 = 3;
pub const EXPERTS: u32 = 4;
/// Nothing in a test takes this long unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A store of `LAYERS` layers of `EXPERTS` experts (and one zero expert) over two files.
pub struct TempSource {
    pub dir: TempDir,
    pub paths: Vec<PathBuf>,
    pub contents: Vec<Vec<u8>>,
    files: Vec<File>,
    stamps: Vec<FileStamp>,
    /// Pieces of each record, in order of layer and expert.
    records: Vec<Vec<FilePiece>>,
    manifest: Option<Manifest>,
    pub generation: u64,
    pub info_bytes: usize,
    pub content_id: Option<u128>,
    /// `file_change` sees nothing, as where a file was replaced by another of the same name.
    pub blind: AtomicBool,
    /// Calls of `file_change`.
    pub looks: AtomicU64,
    /// Happens once, when bytes of a file are about to be read.
    pub before_read: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out.extend_from_slice(&x.to_le_bytes());
    }
    out.truncate(bytes);
    out
}

impl TempSource {
    /// Records of small and large pieces of two files with zeros between and after.
    pub fn pieced(seed: u64) -> Self {
        let mut next = [17u64, 5];
        let mut records = Vec::new();
        for i in 0..u64::from(LAYERS * EXPERTS) {
            let mut pieces = Vec::new();
            for (file, bytes) in [
                (0, 300_001 + i),
                (1, 40),
                (1, 70_003),
                (0, 16 << 10),
                (1, 1 + i),
            ] {
                let offset = next[file];
                next[file] += bytes + 3;
                pieces.push(FilePiece::File {
                    file: file as u32,
                    offset,
                    bytes,
                });
                pieces.push(FilePiece::Zeros {
                    bytes: bytes.next_multiple_of(256) - bytes,
                });
            }
            pieces.push(FilePiece::Zeros { bytes: 70_000 });
            records.push(pieces);
        }
        let contents = vec![
            noise(seed, next[0] as usize),
            noise(seed + 1, next[1] as usize),
        ];
        Self::from_parts(contents, records)
    }

    /// Records of `record_bytes` each, one after another in one file.
    pub fn contiguous(seed: u64, record_bytes: u64) -> Self {
        let records = (0..u64::from(LAYERS * EXPERTS)).map(|i| {
            vec![FilePiece::File {
                file: 0,
                offset: i * record_bytes,
                bytes: record_bytes,
            }]
        });
        let total = record_bytes * u64::from(LAYERS * EXPERTS);
        let mut source = Self::from_parts(vec![noise(seed, total as usize)], records.collect());
        source.manifest = Some(Manifest {
            version: 1,
            num_moe_layers: LAYERS,
            num_experts: EXPERTS,
            inter: 16,
            hidden: 32,
            group_size: 16,
            sub_align: 256,
            fs_block_size: 4096,
            record_stride: record_bytes,
            record_raw_bytes: record_bytes,
            file_template: "experts_{:05}.xpr".into(),
            moe_layer_to_model_layer: (3..3 + LAYERS).collect(),
        });
        source
    }

    /// As [`Self::contiguous`], but the last `bad_bytes` of each record of layer 0 cannot be read
    /// (no file has that offset: `pread` fails with `EINVAL`, as it does with `EIO` from a disk).
    pub fn failing(seed: u64, record_bytes: u64, bad_bytes: u64) -> Self {
        let mut source = Self::contiguous(seed, record_bytes);
        for record in &mut source.records[..EXPERTS as usize] {
            let Some(FilePiece::File { bytes, .. }) = record.first_mut() else {
                panic!("a record is one piece");
            };
            *bytes -= bad_bytes;
            record.push(FilePiece::File {
                file: 0,
                offset: 1 << 63,
                bytes: bad_bytes,
            });
        }
        source
    }

    fn from_parts(contents: Vec<Vec<u8>>, records: Vec<Vec<FilePiece>>) -> Self {
        let dir = TempDir::new().unwrap();
        let mut source = Self {
            paths: Vec::new(),
            files: Vec::new(),
            stamps: Vec::new(),
            contents,
            records,
            manifest: None,
            generation: 1,
            info_bytes: 300,
            content_id: Some(0x1234),
            blind: AtomicBool::new(false),
            looks: AtomicU64::new(0),
            before_read: Mutex::new(None),
            dir,
        };
        for (i, content) in source.contents.iter().enumerate() {
            let path = source.dir.path().join(format!("data-{i}"));
            fs::write(&path, content).unwrap();
            let file = File::open(&path).unwrap();
            source.stamps.push(FileStamp::of(&file.metadata().unwrap()));
            source.files.push(file);
            source.paths.push(path);
        }
        source
    }

    fn pieces(&self, key: Key) -> Option<&Vec<FilePiece>> {
        if key.layer >= LAYERS || key.expert >= EXPERTS {
            return None;
        }
        self.records
            .get((key.layer * EXPERTS + key.expert) as usize)
    }

    pub fn image_bytes(&self, key: Key) -> u64 {
        self.pieces(key).unwrap().iter().map(FilePiece::bytes).sum()
    }

    /// What a client must get for a whole record.
    pub fn image(&self, key: Key) -> Vec<u8> {
        let mut out = Vec::new();
        for piece in self.pieces(key).unwrap() {
            match *piece {
                FilePiece::Zeros { bytes } => out.resize(out.len() + bytes as usize, 0),
                FilePiece::File {
                    file,
                    offset,
                    bytes,
                } => {
                    let content = &self.contents[file as usize];
                    out.extend_from_slice(&content[offset as usize..(offset + bytes) as usize]);
                }
            }
        }
        out
    }
}

impl Source for TempSource {
    fn generation(&self) -> u64 {
        self.generation
    }
    fn content_id(&self) -> Option<u128> {
        self.content_id
    }
    fn layout_id(&self) -> u128 {
        0x5678
    }
    fn v1_manifest(&self) -> Option<&Manifest> {
        self.manifest.as_ref()
    }
    fn info_json(&self) -> Result<Vec<u8>, SourceError> {
        Ok(vec![b'i'; self.info_bytes])
    }
    fn layer_blob(&self, layer: u32, sections: u32) -> Result<Vec<u8>, SourceError> {
        if layer >= LAYERS {
            return Err(SourceError::new(ErrorCode::NoSuchLayer, "no such layer"));
        }
        Ok(format!("blob {layer} {sections}").into_bytes())
    }
    fn file_count(&self) -> usize {
        self.files.len()
    }
    fn file(&self, index: u32) -> Option<&File> {
        if let Some(happen) = self.before_read.lock().unwrap().take() {
            happen();
        }
        self.files.get(index as usize)
    }
    fn file_path(&self, index: u32) -> Option<&Path> {
        self.paths.get(index as usize).map(PathBuf::as_path)
    }
    fn file_change(&self, index: u32) -> Option<String> {
        self.looks.fetch_add(1, Ordering::SeqCst);
        if self.blind.load(Ordering::SeqCst) {
            return None;
        }
        let now = self.files[index as usize].metadata().unwrap();
        self.stamps[index as usize].content_change(&FileStamp::of(&now))
    }
    fn changed_files(&self) -> Vec<(usize, String)> {
        let change = |(i, path): (usize, &PathBuf)| match fs::metadata(path) {
            Ok(now) => self.stamps[i]
                .content_change(&FileStamp::of(&now))
                .map(|why| (i, why)),
            Err(e) => Some((i, e.to_string())),
        };
        self.paths.iter().enumerate().filter_map(change).collect()
    }
    fn for_each_record(&self, f: &mut dyn FnMut(Key, u64)) {
        for layer in 0..LAYERS {
            for expert in 0..EXPERTS {
                let key = Key::new(layer, expert);
                f(key, self.image_bytes(key));
            }
        }
    }
    fn for_each_piece(
        &self,
        key: Key,
        offset: u64,
        bytes: u64,
        f: &mut dyn FnMut(FilePiece),
    ) -> Result<(), SourceError> {
        let Some(pieces) = self.pieces(key) else {
            return Err(match (key.layer < LAYERS, key.expert == EXPERTS) {
                (false, _) => SourceError::new(ErrorCode::NoSuchLayer, "no such layer"),
                (_, true) => SourceError::new(ErrorCode::IdentityExpert, "zero expert"),
                (_, false) => SourceError::new(ErrorCode::NoSuchExpert, "no such expert"),
            });
        };
        let end = offset.checked_add(bytes);
        let Some(end) = end.filter(|&end| end <= self.image_bytes(key)) else {
            return Err(SourceError::new(ErrorCode::BadRange, "beyond the image"));
        };
        let mut at = 0;
        for piece in pieces {
            let (from, to) = (offset.max(at), end.min(at + piece.bytes()));
            if from < to {
                f(match *piece {
                    FilePiece::Zeros { .. } => FilePiece::Zeros { bytes: to - from },
                    FilePiece::File { file, offset, .. } => FilePiece::File {
                        file,
                        offset: offset + (from - at),
                        bytes: to - from,
                    },
                });
            }
            at += piece.bytes();
        }
        Ok(())
    }
}

/// A configuration for tests: a free port and short time-outs.
pub fn config(source: &Arc<TempSource>) -> PeerConfig {
    let mut config = PeerConfig::new(source.clone());
    config.listen = vec!["127.0.0.1:0".into()];
    config.limits.handshake_timeout = Duration::from_millis(400);
    config.limits.frame_timeout = Duration::from_millis(400);
    config.limits.send_timeout = Duration::from_millis(1500);
    config
}

pub fn start(source: &Arc<TempSource>) -> Peer {
    Peer::start(config(source)).unwrap()
}

/// Waits for a condition that other threads bring about.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "still not so: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// One connection.
pub struct Client {
    pub stream: TcpStream,
    pub greeting: Greeting,
}

impl Client {
    /// Connects and reads the greeting.
    pub fn connect(address: SocketAddr) -> Self {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let mut len = [0; 4];
        stream.read_exact(&mut len).unwrap();
        let len = v1::check_manifest_bytes(u32::from_le_bytes(len)).unwrap();
        let mut json = vec![0; len];
        stream.read_exact(&mut json).unwrap();
        Self {
            stream,
            greeting: Greeting::decode(&json).unwrap(),
        }
    }

    /// Connects and goes through the v2 handshake.
    pub fn v2(address: SocketAddr) -> (Self, Welcome) {
        let mut client = Self::connect(address);
        client.stream.write_all(&[v1::MODE_V2]).unwrap();
        client.send(FrameKind::ClientHello, 9, &hello().encode());
        let (header, payload) = client.frame().unwrap();
        assert_eq!((header.kind, header.id), (FrameKind::ServerHello, 9));
        ServerHello::decode(&payload).unwrap();
        let (header, payload) = client.frame().unwrap();
        assert_eq!((header.kind, header.id), (FrameKind::Welcome, 9));
        (client, Welcome::decode(&payload).unwrap())
    }

    pub fn send(&mut self, kind: FrameKind, id: u64, payload: &[u8]) {
        let mut out = Vec::new();
        push_frame(&mut out, kind, id, payload);
        self.stream.write_all(&out).unwrap();
    }

    /// The next frame; `None` at the end of the connection, wherever that is.
    pub fn frame(&mut self) -> Option<(FrameHeader, Vec<u8>)> {
        let mut header = [0; HEADER_BYTES];
        self.read_exact(&mut header)?;
        let header = FrameHeader::decode(&header, limits::FRAME_MAX_BYTES).unwrap();
        let mut payload = vec![0; header.payload_bytes as usize];
        self.read_exact(&mut payload)?;
        Some((header, payload))
    }

    fn read_exact(&mut self, into: &mut [u8]) -> Option<()> {
        match self.stream.read_exact(into) {
            Ok(()) => Some(()),
            Err(e) if ended(&e) => None,
            Err(e) => panic!("reading: {e}"),
        }
    }

    pub fn error(&mut self) -> (u64, ErrorFrame) {
        let (header, payload) = self.frame().expect("an error frame");
        assert_eq!(header.kind, FrameKind::Error);
        (header.id, ErrorFrame::decode(&payload).unwrap())
    }

    /// Asserts that the connection ends, whatever still comes, and gives back how long that took.
    pub fn expect_end(&mut self) -> Duration {
        let start = Instant::now();
        let mut scrap = vec![0; 1 << 16];
        loop {
            match self.stream.read(&mut scrap) {
                Ok(0) => return start.elapsed(),
                Ok(_) => {}
                Err(e) if ended(&e) => return start.elapsed(),
                Err(e) => panic!("the peer did not close: {e}"),
            }
        }
    }

    pub fn read(&mut self, id: u64, request: ReadRequest) {
        self.send(FrameKind::Read, id, &request.encode());
    }

    /// Reads a range and gives back its bytes or the error.
    pub fn fetch(&mut self, request: ReadRequest) -> Result<Vec<u8>, ErrorFrame> {
        self.read(77, request);
        let (header, payload) = self.frame().expect("an answer");
        assert_eq!(header.id, 77);
        match header.kind {
            FrameKind::Data => Ok(payload),
            FrameKind::Error => Err(ErrorFrame::decode(&payload).unwrap()),
            other => panic!("{other:?} as the answer to READ"),
        }
    }
}

fn ended(e: &io::Error) -> bool {
    use io::ErrorKind::*;
    matches!(e.kind(), UnexpectedEof | ConnectionReset | BrokenPipe)
}

pub fn hello() -> ClientHello {
    ClientHello {
        version_min: 2,
        version_max: 2,
        client_id: 5,
        role: Role::Stream,
    }
}

pub fn request(key: Key, epoch: u32, offset: u64, bytes: u64) -> ReadRequest {
    ReadRequest {
        key,
        epoch,
        bytes: bytes as u32,
        offset,
    }
}
