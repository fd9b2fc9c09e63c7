//! Writes `corpus/`: a few small inputs for each target, from the fixtures of the tests and from our
//! own encoders. Run again, it writes the same bytes.
//!
//! `cargo run --manifest-path fuzz/Cargo.toml --bin make-seeds`
#![forbid(unsafe_code)]

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use atlas_expert_fuzz::{NONCES, TOKEN};
use expert_store::checkpoint;
use expert_store::codec::{self, Sections};
use expert_store::{BuildOptions, OpenOptions, Store};
use expert_tier::replay::{SynthTrace, write_header, write_row};
use expert_wire::auth::{AuthChallenge, AuthProof, AuthResponse, Token};
use expert_wire::client::{Handshake, Protocol};
use expert_wire::frame::{FrameKind, push_frame};
use expert_wire::message::{
    CatalogueRequest, ChecksumReport, ClientHello, ErrorCode, ErrorFrame, ReadRequest, Role,
    SECTION_CHECKSUMS, ServerHello, Welcome,
};
use expert_wire::server::{Event, ServerSession};
use expert_wire::v1::{self, Greeting, Manifest, V2Offer};
use expert_wire::v1_verbs::{
    V1Endpoint, V1Rail, V1Region, encode_client_rails, encode_server_rails,
};
use expert_wire::verbs::{OpenRail, QpEndpoint, RailInfo, RailOpened, Region, encode_rails};
use expert_wire::{Key, limits};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// Headers of tensors, each of another layout.
const SAFETENSORS: &[&str] = &[
    "saved-qwen3moe/model-00002-of-00003.safetensors",
    "nvfp4-modelopt/model.safetensors",
    "gpt-oss-mxfp4/model.safetensors",
    "dbrx/model.safetensors",
    "f4-stacked/model.safetensors",
    "odd-header/model.safetensors",
    "longcat/model.safetensors",
    "lora-inside/model.safetensors",
];
const GGUF: &[&str] = &[
    "gguf-q8_0/model.gguf",
    "gguf-gptoss-mxfp4/model.gguf",
    "gguf-fused-gate-up/model.gguf",
    "gguf-v2/model.gguf",
    "gguf-align64/model.gguf",
    "gguf-split3/model-00001-of-00003.gguf",
];
const CONFIGS: &[&str] = &[
    "deepseek-v3-fp8-mtp",
    "dbrx",
    "longcat",
    "llama4-bf16",
    "granite-hybrid-dense",
    "qwen3-omni",
];
const INDEXES: &[&str] = &["saved-qwen3moe", "deepseek-v3-fp8-mtp"];
/// Checkpoints whose first and last layers become blobs.
const LAYERS: &[&str] = &["nvfp4-modelopt", "gpt-oss-mxfp4", "saved-qwen3moe", "exl3"];
/// Longest GGUF seed: the header of these files is shorter.
const GGUF_SEED_BYTES: usize = 6 << 10;

fn main() -> Result {
    let seeds = Seeds(Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus"));
    headers(&seeds)?;
    stores(&seeds)?;
    wire(&seeds)?;
    traces(&seeds)?;
    let bytes = seeds.total_bytes()?;
    println!("{bytes} bytes in {}", seeds.0.display());
    Ok(())
}

fn traces(seeds: &Seeds) -> Result {
    let spec = SynthTrace {
        layers: 3,
        experts: 12,
        top_k: 3,
        steps: 8,
        seed: 0,
        zipf: 0.7,
        skew: 0.2,
        reuse: 0.2,
    };
    let mut rows = Vec::new();
    for row in spec.rows()? {
        write_row(&mut rows, &row)?;
    }
    let mut whole = Vec::new();
    write_header(&mut whole, &spec.header())?;
    whole.extend_from_slice(&rows);
    seeds.put("replay_trace", "made-up", whole)?;
    seeds.put("replay_trace", "rows-alone", rows)?;
    // Layers left out, a step with gaps, a layer without experts, blank lines.
    let sparse = "\n{\"step\":2,\"layer\":1,\"experts\":[]}\n\n{\"layer\":9,\"experts\":[7,0],\"step\":2}\r\n{\"step\":40,\"layer\":0,\"experts\":[63]}";
    seeds.put("replay_trace", "sparse", sparse)
}

struct Seeds(PathBuf);

impl Seeds {
    fn put(&self, target: &str, name: &str, bytes: impl AsRef<[u8]>) -> Result {
        let dir = self.0.join(target);
        fs::create_dir_all(&dir)?;
        Ok(fs::write(dir.join(name), bytes)?)
    }

    fn total_bytes(&self) -> Result<u64> {
        let mut bytes = 0;
        for target in fs::read_dir(&self.0)? {
            for seed in fs::read_dir(target?.path())? {
                bytes += seed?.metadata()?.len();
            }
        }
        Ok(bytes)
    }
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/checkpoints")
        .join(name)
}

/// `gguf-v2/model.gguf` as a name of a seed.
fn flat(name: &str) -> String {
    name.replace('/', "-")
}

fn headers(seeds: &Seeds) -> Result {
    for name in SAFETENSORS {
        let file = fs::read(fixture(name))?;
        let header = file.first_chunk::<8>().ok_or("no header")?;
        let end = 8 + usize::try_from(u64::from_le_bytes(*header))?;
        let start = file.get(..end).ok_or("a header beyond the file")?;
        seeds.put("checkpoint_safetensors", &flat(name), start)?;
    }
    // Whole, so that one seed passes without being stretched.
    let whole = fs::read(fixture("f4-stacked/model.safetensors"))?;
    seeds.put("checkpoint_safetensors", "whole", whole)?;
    for name in GGUF {
        let mut file = fs::read(fixture(name))?;
        file.truncate(GGUF_SEED_BYTES);
        seeds.put("checkpoint_gguf", &flat(name), file)?;
    }
    for name in CONFIGS {
        let text = fs::read(fixture(name).join("config.json"))?;
        seeds.put("checkpoint_config", name, text)?;
    }
    for name in INDEXES {
        let text = fs::read(fixture(name).join("model.safetensors.index.json"))?;
        seeds.put("checkpoint_index", name, text)?;
    }
    Ok(())
}

fn stores(seeds: &Seeds) -> Result {
    let dir = tempfile::tempdir()?;
    let plain = OpenOptions {
        checksums: false,
        ..OpenOptions::default()
    };
    for name in LAYERS {
        let store = Store::open(fixture(name), &OpenOptions::default())?;
        let layers = &store.catalogue().layers;
        let layer = layers.last().ok_or("a checkpoint without layers")?;
        let blob = codec::encode_layer(layer, Sections::ALL);
        seeds.put("store_layer_blob", &format!("{name}-in-place"), blob)?;
    }
    for stack in checkpoint::open(&fixture("deepseek-v3-fp8-mtp"))?.stacks {
        let layer = stack.layers.first().ok_or("a stack without layers")?;
        let blob = codec::encode_layer(layer, Sections::ALL);
        seeds.put("store_layer_blob", &format!("{}-first", stack.prefix), blob)?;
    }
    let (packed, v1) = (dir.path().join("packed"), dir.path().join("v1"));
    let options = BuildOptions::default();
    expert_store::pack(
        &Store::open(fixture("saved-qwen3moe"), &plain)?,
        &packed,
        &options,
    )?;
    expert_store::pack_v1(
        &Store::open(fixture("nvfp4-modelopt"), &plain)?,
        &v1,
        &options,
    )?;
    for (name, path) in [("packed", &packed), ("v1", &v1)] {
        seeds.put(
            "store_manifest",
            name,
            fs::read(path.join("manifest.json"))?,
        )?;
        let store = Store::open(path, &plain)?;
        seeds.put("store_info", name, serde_json::to_vec(store.info())?)?;
        let first = store.catalogue().layers.first().ok_or("no layers")?;
        let blob = codec::encode_layer(first, Sections::ALL);
        seeds.put("store_layer_blob", name, blob)?;
    }
    Ok(())
}

fn wire(seeds: &Seeds) -> Result {
    let hello = ClientHello {
        version_min: 2,
        version_max: 2,
        client_id: 9,
        role: Role::Control,
    };
    let server_hello = ServerHello {
        version: 2,
        auth: 0,
        instance_id: 5,
    };
    let welcome = Welcome {
        instance_id: 5,
        epoch: 1,
        read_max_bytes: limits::READ_MAX_BYTES,
        generation: 3,
        content_id: Some(77),
        layout_id: 78,
    };
    let catalogue = CatalogueRequest {
        layer: 1,
        sections: SECTION_CHECKSUMS,
    };
    let read = ReadRequest {
        key: Key::new(1, 2),
        epoch: 1,
        bytes: 4096,
        offset: 256,
    };
    let report = ChecksumReport {
        key: Key::new(1, 2),
        chunk: 3,
        epoch: 1,
    };
    let challenge = AuthChallenge { nonce: [1; 32] };
    let response = AuthResponse {
        nonce: [2; 32],
        mac: [3; 32],
    };
    let proof = AuthProof { mac: [4; 32] };
    let error = ErrorFrame::new(ErrorCode::NoSuchExpert, "layer 1 has 4 experts");
    let payloads: Vec<(&str, FrameKind, Vec<u8>)> = vec![
        ("client-hello", FrameKind::ClientHello, hello.encode()),
        (
            "server-hello",
            FrameKind::ServerHello,
            server_hello.encode(),
        ),
        ("welcome", FrameKind::Welcome, welcome.encode()),
        ("catalogue", FrameKind::Catalogue, catalogue.encode()),
        ("read", FrameKind::Read, read.encode().to_vec()),
        (
            "checksum-report",
            FrameKind::ChecksumReport,
            report.encode(),
        ),
        ("error", FrameKind::Error, error.encode()),
        ("rails", FrameKind::Rails, Vec::new()),
        (
            "rails-reply",
            FrameKind::RailsReply,
            encode_rails(&[rail()]),
        ),
        ("open-rail", FrameKind::OpenRail, open_rail().encode()),
        ("rail-opened", FrameKind::RailOpened, rail_opened().encode()),
        ("store-info", FrameKind::StoreInfo, Vec::new()),
        ("ping", FrameKind::Ping, vec![7; 64]),
        ("goodbye", FrameKind::Goodbye, Vec::new()),
        (
            "auth-challenge",
            FrameKind::AuthChallenge,
            challenge.encode(),
        ),
        ("auth-response", FrameKind::AuthResponse, response.encode()),
        ("auth-proof", FrameKind::AuthProof, proof.encode()),
    ];
    let mut frames = Vec::new();
    let mut session = Vec::new();
    for (id, (name, kind, payload)) in (1..).zip(&payloads) {
        if !payload.is_empty() {
            seeds.put("wire_messages", name, payload)?;
        }
        push_frame(&mut frames, *kind, id, payload);
        let of_server = [
            FrameKind::ServerHello,
            FrameKind::Welcome,
            FrameKind::RailsReply,
            FrameKind::RailOpened,
            FrameKind::Error,
            FrameKind::AuthChallenge,
            FrameKind::AuthResponse,
            FrameKind::AuthProof,
        ];
        if !of_server.contains(kind) {
            push_frame(&mut session, *kind, id, payload);
        }
    }
    seeds.put("wire_frames", "one-of-each", frames)?;
    seeds.put(
        "wire_messages",
        "v1-request",
        v1::encode_request(Key::new(1, 2)),
    )?;

    // Choices, three cuts, the mode byte, the frames.
    let head = |choices: u8, mode: u8| [choices, 3, 0, 15, 40, mode];
    let v2 = [&head(1, v1::MODE_V2)[..], &session].concat();
    seeds.put("wire_server", "v2", v2)?;
    let refused = [&head(3, v1::MODE_V2)[..], &session].concat();
    seeds.put("wire_server", "v2-refused", refused)?;
    let record = v1::encode_request(Key::new(1, 2));
    let end = v1::encode_request(Key::new(v1::END, v1::END));
    let v1_session = [&head(1, v1::MODE_TCP)[..], &record, &record, &end].concat();
    seeds.put("wire_server", "v1", v1_session)?;

    let endpoint = V1Endpoint {
        qpn: 17,
        psn: 5,
        gid: [9; 16],
    };
    let ends = encode_client_rails(&[endpoint, endpoint]);
    let verbs = [&head(5, v1::MODE_VERBS)[..], &[2], &ends].concat();
    seeds.put("wire_server", "v1-verbs", verbs)?;
    seeds.put("wire_messages", "v1-client-rails", &ends[1..])?;

    let manifest = Manifest {
        version: 1,
        num_moe_layers: 2,
        num_experts: 256,
        inter: 512,
        hidden: 2048,
        group_size: 16,
        sub_align: 256,
        fs_block_size: 4096,
        record_stride: 1_773_568,
        record_raw_bytes: 1_769_728,
        file_template: "experts_{:05}.xpr".into(),
        moe_layer_to_model_layer: vec![3, 4],
    };
    let offer = V2Offer {
        versions: vec![2],
        instance_id: 5,
        capabilities: vec!["tcp".into()],
        refused: None,
    };
    let busy = V2Offer {
        refused: Some("busy".into()),
        ..offer.clone()
    };
    let region = V1Region {
        base: 1 << 32,
        rkey: 3,
    };
    let offered = V1Rail {
        endpoint,
        layers: vec![region; 2],
    };
    let greeting = Greeting {
        manifest: Some(manifest.clone()),
        v2: None,
    };
    // The V1Verbs client that asks for two rails.
    let exchange = [
        &[3 | 1 << 3][..],
        &greeting.encode(),
        &encode_server_rails(&[offered.clone(), offered]),
    ];
    seeds.put("wire_client", "v1-verbs", exchange.concat())?;
    let mut answer = Vec::new();
    push_frame(
        &mut answer,
        FrameKind::ServerHello,
        0,
        &server_hello.encode(),
    );
    push_frame(&mut answer, FrameKind::Welcome, 0, &welcome.encode());
    for (name, manifest, v2) in [
        ("v1", Some(manifest.clone()), None),
        ("both", Some(manifest), Some(offer.clone())),
        ("stub", None, Some(offer)),
        ("busy", None, Some(busy)),
    ] {
        let greeting = Greeting { manifest, v2 }.encode();
        seeds.put("wire_greeting", name, &greeting[4..])?;
        seeds.put("wire_client", name, [&[2][..], &greeting, &answer].concat())?;
    }
    with_token(seeds, &welcome)
}

/// A session of both sides that know a token, as each hears it.
fn with_token(seeds: &Seeds, welcome: &Welcome) -> Result {
    let token = Token::from_text(TOKEN.to_vec())?;
    let mut client = Handshake::new(7, Role::Stream, Protocol::V2).with_token(&token, NONCES[0]);
    let mut server = ServerSession::with_token(7, &token, NONCES[1]);
    let (mut from_client, mut from_server, mut heard) = (Vec::new(), Vec::new(), 0);
    while client.wants() > 0 {
        let said = client.take_transmit();
        server.feed(&said);
        from_client.extend(said);
        while let Some(event) = server.poll_event() {
            if matches!(event, Event::Hello(_)) {
                server.accept(welcome);
            }
        }
        from_server.append(server.output());
        let end = heard + client.wants();
        let now = from_server.get(heard..end).ok_or("the server stops")?;
        client.handle(now)?;
        heard = end;
    }
    let mut asking = from_client.clone();
    push_frame(&mut asking, FrameKind::StoreInfo, 1, &[]);
    // As below; the choice of v2, a stream and a token.
    seeds.put(
        "wire_server",
        "token",
        [&[9, 3, 0, 15, 40][..], &asking].concat(),
    )?;
    let hasty = &asking[..from_client.len() - 80];
    let mut hasty = hasty.to_vec();
    push_frame(&mut hasty, FrameKind::StoreInfo, 1, &[]);
    seeds.put(
        "wire_server",
        "token-missing",
        [&[9, 0][..], &hasty].concat(),
    )?;
    seeds.put(
        "wire_client",
        "token",
        [&[1 | 4 | 64][..], &from_server].concat(),
    )?;
    seeds.put(
        "wire_client",
        "token-missing",
        [&[1 | 4][..], &from_server].concat(),
    )
}

fn rail() -> RailInfo {
    RailInfo {
        name: "rxe0".into(),
        link_layer: 2,
        gid_type: 2,
        mtu_code: 3,
        prefix_len: Some(24),
        lid: 0,
        reads_max: 16,
        qps_max: 4,
        link_mbit_per_s: 100_000,
        gid: [3; 16],
        ip: Some([10, 0, 0, 2].into()),
    }
}

fn open_rail() -> OpenRail {
    OpenRail {
        rail: 0,
        mtu_code: 3,
        reads_max: 16,
        link_layer: 2,
        gid_type: 2,
        lid: 0,
        epoch: 1,
        service_level: 0,
        traffic_class: 0,
        gid: [4; 16],
        qps: qps(),
    }
}

fn rail_opened() -> RailOpened {
    let region = |file_offset| Region {
        file: 0,
        rkey: 3,
        file_offset,
        bytes: 4096,
        addr: 1 << 32,
    };
    RailOpened {
        epoch: 1,
        mtu_code: 3,
        reads_max: 16,
        link_layer: 2,
        lid: 0,
        gid: [3; 16],
        qps: qps(),
        regions: vec![region(0), region(4096)],
    }
}

fn qps() -> Vec<QpEndpoint> {
    vec![
        QpEndpoint { qpn: 17, psn: 5 },
        QpEndpoint { qpn: 18, psn: 6 },
    ]
}
