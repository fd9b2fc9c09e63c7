//! A peer with a token, over real verbs: queue-pair parameters and keys are told to clients that know it, and to nobody
//! else. The cards' packet counters say that nothing was read without it.

use std::fs::{self, Permissions};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use atlas_expert_tests::binary::{self, Output};
use atlas_expert_tests::guest;
use atlas_expert_tests::net::model::Records;
use atlas_expert_tests::net::raw::{RawClient, frame};
use atlas_expert_tests::net::rig::{assert_all_right, patient};
use expert_tier::TierError;
use expert_wire::auth::Token;
use expert_wire::client::HandshakeError;
use expert_wire::frame::{FrameHeader, FrameKind, HEADER_BYTES};
use expert_wire::limits;
use expert_wire::message::{ClientHello, ErrorCode, ErrorFrame, Role};
use expert_wire::v1;

use crate::peer::{ADDR, Host, PATIENCE, SIXTEEN, records_of, tier_with, verbs};

const METRICS: &str = "10.78.0.1:9910";

/// Sum of a counter of the peer over its labels.
fn counter(name: &str) -> Result<u64> {
    let mut stream = TcpStream::connect(METRICS)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    let values = page.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let (labels, value) = rest.rsplit_once(' ')?;
        (labels.is_empty() || labels.starts_with('{')).then_some(value)
    });
    let values: Vec<&str> = values.collect();
    ensure!(!values.is_empty(), "no {name} in {page}");
    values
        .into_iter()
        .map(|v| v.parse::<u64>().with_context(|| format!("{name} {v}")))
        .sum()
}

/// Waits until the peer has counted so many clients without the token, and none more.
fn refused(wanted: u64) -> Result<()> {
    const NAME: &str = "atlas_expert_peer_auth_refused_total";
    let start = Instant::now();
    while counter(NAME)? < wanted && start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let found = counter(NAME)?;
    ensure!(found == wanted, "{found} refused instead of {wanted}");
    Ok(())
}

/// Packets that the rail's two devices sent and received: this guest's, the peer's.
fn packets(there: &Host) -> Result<[u64; 4]> {
    let of = "/sys/class/infiniband/rxe0/ports/1/hw_counters";
    let peer = there.run(&format!("cat {of}/sent_pkts {of}/rcvd_pkts"))?;
    let peer: Vec<u64> = peer.lines().map(str::parse).collect::<Result<_, _>>()?;
    let here = ["sent_pkts", "rcvd_pkts"].map(|name| guest::rail_counter(0, name));
    Ok([here[0], here[1], peer[0], peer[1]])
}

fn fetch(token: Option<&Path>) -> Output {
    let mut command = binary::command("atlas-expert", &[&"fetch", &"--json", &"-q"]);
    command
        .args(["--expert-backend", "rdma-verbs", "--require-rdma"])
        .args([
            "--rail",
            "rxe0",
            "--stall-ms",
            "5000",
            "--deadline-ms",
            "60000",
        ])
        .args(["--expert-peer", ADDR]);
    if let Some(path) = token {
        command.arg("--auth-token-file").arg(path);
    }
    binary::run(&mut command)
}

/// How connecting a tier for verbs fails.
fn handshake(token: Option<Token>, records: &Records) -> Result<HandshakeError> {
    match tier_with(patient().auth_token(token), verbs(1), records, 1) {
        Ok(_) => anyhow::bail!("the peer let it in"),
        Err(e) => match e.downcast::<TierError>()? {
            TierError::Handshake { source, .. } => Ok(source),
            other => Err(other.into()),
        },
    }
}

/// The kinds of the frames behind the peer's first message, and its error.
fn answer(client: &mut RawClient) -> Result<(Vec<FrameKind>, Option<ErrorFrame>)> {
    let said = client.read_to_end();
    let (mut kinds, mut error, mut rest) = (vec![], None, &said[..]);
    while let Some(header) = rest.first_chunk::<HEADER_BYTES>() {
        let header = FrameHeader::decode(header, limits::FRAME_MAX_BYTES)?;
        let end = HEADER_BYTES + header.payload_bytes as usize;
        let payload = rest.get(HEADER_BYTES..end).context("a whole frame")?;
        if header.kind == FrameKind::Error {
            error = Some(ErrorFrame::decode(payload)?);
        }
        kinds.push(header.kind);
        rest = &rest[end..];
    }
    Ok((kinds, error))
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn queue_pairs_and_keys_are_for_clients_with_the_token_alone() -> Result<()> {
    let there = Host::new()?;
    let records = records_of(SIXTEEN);
    let store = there.synth("store", SIXTEEN)?;
    let token_there = there.path("token");
    let _peer = there.serve_closed(
        &store,
        &format!("--rail rxe0 --auth-token-file {token_there} --create-auth-token --metrics 10.78.0.1:9910"),
    )?;
    let text = there.run(&format!("cat {token_there}"))?;
    let folder = tempfile::tempdir()?;
    let [right, wrong] = ["right", "wrong"].map(|name| folder.path().join(name));
    for (path, text) in [
        (&right, text.trim()),
        (&wrong, "another text of some length"),
    ] {
        fs::write(path, text)?;
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
    }
    let opens = || counter("atlas_expert_peer_rail_opens_total");
    let queue_pairs = || there.run("rdma resource show qp");
    let unused = queue_pairs()?;
    let still = packets(&there)?;

    // The program, as a user has it.
    let output = fetch(None);
    let error = output.error(1);
    ensure!(error.contains("wants a token"), "{error}");
    refused(1)?;
    let output = fetch(Some(&wrong));
    let error = output.error(1);
    ensure!(error.contains("Unauthorized"), "{error}");
    refused(2)?;

    // The library: typed.
    let error = handshake(None, &records)?;
    ensure!(matches!(error, HandshakeError::TokenNeeded), "{error}");
    refused(3)?;
    let other = Token::from_text(b"another text of some length".to_vec())?;
    let error = handshake(Some(other), &records)?;
    let HandshakeError::Error(told) = error else {
        anyhow::bail!("no typed refusal: {error}");
    };
    ensure!(
        told.code == ErrorCode::Unauthorized && !told.retryable,
        "{told:?}"
    );
    refused(4)?;

    // Whoever keeps to no protocol: asks for rails, and opens one, instead of a proof.
    let addr: SocketAddr = ADDR.parse()?;
    for kind in [FrameKind::Rails, FrameKind::OpenRail] {
        let mut hasty = RawClient::connect(addr);
        hasty.greeting();
        let hello = ClientHello {
            version_min: 2,
            version_max: 2,
            role: Role::Control,
            client_id: 7,
        };
        let mut bytes = vec![v1::MODE_V2];
        bytes.extend(frame(FrameKind::ClientHello, 0, &hello.encode()));
        bytes.extend(frame(kind, 1, &[0; 64]));
        hasty.send(&bytes)?;
        let (kinds, error) = answer(&mut hasty)?;
        let code = error.context("an error frame")?.code;
        ensure!(code == ErrorCode::Unauthorized, "{code:?}");
        let before_the_proof = [
            FrameKind::ServerHello,
            FrameKind::AuthChallenge,
            FrameKind::Error,
        ];
        ensure!(kinds == before_the_proof, "{kinds:?}");
    }
    refused(6)?;
    // The old protocol, where queue pairs come first.
    let mut old = RawClient::connect(addr);
    ensure!(old.greeting().manifest.is_none());
    old.send(&[v1::MODE_VERBS, 1])?;
    ensure!(old.read_to_end().is_empty());
    refused(7)?;

    ensure!(opens()? == 0, "{} rails were opened", opens()?);
    ensure!(queue_pairs()? == unused, "{}", queue_pairs()?);
    let now = packets(&there)?;
    ensure!(now == still, "packets {still:?}, then {now:?}");

    // The token opens it: for the program, and for the library with every record compared.
    let report = fetch(Some(&right)).json();
    let digest = there.run(&format!(
        "{} fetch --expert-backend posix --store {store} --json -q",
        binary::path("atlas-expert").display()
    ))?;
    let digest: serde_json::Value = serde_json::from_str(&digest)?;
    ensure!(report["verified"] == true, "{report:#}");
    ensure!(
        report["payload_digest"] == digest["payload_digest"],
        "{report:#}"
    );
    let rails = report["rails"].as_array().context("rails")?;
    let of_verbs = rails
        .iter()
        .all(|r| r["kind"] == "verbs" && r["errors"] == 0);
    ensure!(of_verbs && report["takeovers"] == 0, "{report:#}");
    ensure!(opens()? > 0);
    let token = Token::from_text(text.trim().as_bytes().to_vec())?;
    let tier = tier_with(patient().auth_token(Some(token)), verbs(1), &records, 16)?;
    assert_all_right(&tier, &records, 16);
    let bytes: usize = records.values().map(Vec::len).sum();
    let read = packets(&there)?[1] - still[1];
    guest::figure("packets_with_the_token", read);
    ensure!(
        read >= 2 * bytes as u64 / 4096,
        "{read} packets for {bytes} bytes"
    );
    refused(7)
}
