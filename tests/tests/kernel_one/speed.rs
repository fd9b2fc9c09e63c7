//! How fast READs are beside other programs, in the same guest, over the same device, of the same sizes. The figures go
//! to the report; what is asserted is that everything came, never how long it took.
//!
//! What each side's figure is of:
//!
//! * **fetch**: from the first request to the last record that a caller may read, of a tier that is connected: orders,
//!   READs, padding, checksums where they are on, commits. The catalogue of each layer is asked for within it, at its first
//!   record. Start, connection and the registration of memory are not in it.
//! * **ib_read_bw**: from its first post to its last completion, one queue pair, a deep queue, always the same two
//!   buffers; nobody looks at the bytes, and it polls without sleeping.
//! * **Mooncake**: its calls for a batch from Python, a call per batch, when it is connected and its memory registered; nobody
//!   looks at the bytes while the time is taken.
//!
//! Fetch and Mooncake read into as many places as a batch has READs, again and again.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use atlas_expert_tests::binary;
use atlas_expert_tests::guest::{self, Agent, Signal};
use atlas_expert_tests::net::model::{Model, Sizes};
use atlas_expert_tests::net::process::PeerProcess;
use xxhash_rust::xxh3::xxh3_64;

/// For anything that a guest under emulation does in seconds.
const LONG: Duration = Duration::from_secs(60);
/// Each program runs so often, in turn with the others; the figure is the median.
const ROUNDS: usize = 5;
/// What one run is to take, at the yardstick's speed: long beside a wake-up, short enough for all of them.
const SAMPLE: Duration = Duration::from_secs(2);
/// Passes over all records of one run at most: 1 GiB.
const PASSES_MAX: usize = 32;
/// Records of one request, and READs of one call of the other engine.
const BATCHES: [usize; 2] = [1, 8];
/// 32 records of 1,047,552 bytes: three leaves that are as close to 1 MiB as whole tensors come.
const RECORDS: Sizes = Sizes {
    layers: 2,
    experts: 16,
    hidden: 512,
    inter: 341,
    seed: 1,
};
const RECORD_COUNT: usize = 32;
const READ_BYTES: usize = 1 << 20;
const CHUNK_BYTES: usize = 256 << 10;

/// A packed store behind a peer on the first rail.
struct Served {
    peer: PeerProcess,
    _model: Model,
}

impl Served {
    fn new() -> Self {
        let model = Model::bf16(RECORDS);
        let peer = PeerProcess::start(&model.pack(), &["--rail", "rxe0", "--rdma", "require"]);
        Self {
            peer,
            _model: model,
        }
    }

    /// Fetches every record and gives MB/s (10^6 bytes).
    fn fetch(&self, flags: &[&str]) -> Result<f64> {
        let mut command = binary::command("atlas-expert", &[&"fetch", &"-q", &"--json"]);
        command
            .args(["--expert-backend", "rdma-verbs", "--require-rdma"])
            .args(["--rail", "rxe0", "--expert-peer"])
            .arg(self.peer.addr.to_string())
            .args(["--stall-ms", "10000", "--deadline-ms", "60000"])
            .args(["--window-kib", "8192", "--no-digest"])
            .args(flags)
            .env_remove("ATLAS_EXPERT_CONTENT_ID");
        let report = binary::run(&mut command).json();
        let number = |key: &str| report[key].as_f64().context("a number");
        ensure!(number("records")? as usize % RECORD_COUNT == 0, "{report}");
        Ok(number("bytes")? / number("seconds")? / 1e6)
    }

    /// CPU time of the peer's process so far, in the kernel's ticks (a hundredth of a second).
    fn cpu_ticks(&self) -> Result<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.peer.pid()))?;
        let (_, fields) = stat.rsplit_once(')').context("a name")?;
        // After the name: the state is field 3, user time 14, system time 15.
        let fields: Vec<&str> = fields.split_whitespace().collect();
        Ok(fields[11].parse::<u64>()? + fields[12].parse::<u64>()?)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Tells a figure and what it is in proportion to another.
fn tell(name: &str, mb_per_s: f64, other: &str, others_mb_per_s: f64) {
    guest::figure(&format!("{name}_mb_per_s"), mb_per_s);
    guest::figure(
        &format!("{name}_by_{other}_ratio"),
        mb_per_s / others_mb_per_s,
    );
}

/// Figures of one program in one setting, and what it is in proportion to.
struct Contender {
    name: String,
    flags: Vec<String>,
    mb_per_s: Vec<f64>,
}

impl Contender {
    fn new(name: &str, flags: &str) -> Self {
        Self {
            name: name.to_owned(),
            flags: flags.split(' ').map(str::to_owned).collect(),
            mb_per_s: Vec::new(),
        }
    }
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_fetch_is_timed_beside_ib_read_bw_and_mooncake() -> Result<()> {
    let agent = Agent::of_the_run()?;
    let served = Served::new();
    let mooncake = Mooncake::new()?;
    let at = mooncake.serve()?;
    mooncake.wake(false)?;
    let yardstick = |passes: usize| {
        let reads = passes * RECORD_COUNT;
        guest::ib_read_bw(&agent, 0, READ_BYTES, reads, LONG)
    };
    let pass_mb = (RECORD_COUNT * READ_BYTES) as f64 / 1e6;
    let passes = (yardstick(1)? * SAMPLE.as_secs_f64() / pass_mb) as usize;
    let passes = passes.clamp(1, PASSES_MAX);
    guest::figure(
        "bytes_a_sample",
        (passes * RECORD_COUNT * READ_BYTES) as f64,
    );
    // Eight records in flight, and the next four asked for when four are there; or one batch after the other.
    let mut ours = vec![
        Contender::new(
            "fetch_1_qp_unverified",
            "--batch 4 --depth 2 --qps-per-rail 1 --verify off",
        ),
        Contender::new("fetch_2_qps_unverified", "--batch 4 --depth 2 --verify off"),
        Contender::new("fetch_2_qps_verified", "--batch 4 --depth 2"),
    ];
    for batch in BATCHES {
        for verify in ["off", "always"] {
            let name = format!("fetch_batch_{batch}_verify_{verify}");
            let flags = format!("--batch {batch} --depth 1 --verify {verify}");
            ours.push(Contender::new(&name, &flags));
        }
    }
    let mut ib_read_bw = Vec::new();
    let mut theirs = BATCHES.map(|_| Vec::new());
    for _ in 0..ROUNDS {
        ib_read_bw.push(yardstick(passes)?);
        for contender in &mut ours {
            let repeat = ["--repeat".to_owned(), passes.to_string()];
            let flags: Vec<&str> = contender
                .flags
                .iter()
                .chain(&repeat)
                .map(String::as_str)
                .collect();
            contender.mb_per_s.push(served.fetch(&flags)?);
        }
        mooncake.wake(true)?;
        let speeds = mooncake.read(&at, passes, &BATCHES)?;
        mooncake.wake(false)?;
        ensure!(speeds.len() == BATCHES.len(), "{speeds:?}");
        for (theirs, speed) in theirs.iter_mut().zip(speeds) {
            theirs.push(speed);
        }
    }
    let ib_read_bw = median(ib_read_bw);
    guest::figure("ib_read_bw_mb_per_s", ib_read_bw);
    let theirs = theirs.map(median);
    for (batch, theirs) in BATCHES.iter().zip(theirs) {
        guest::figure(&format!("mooncake_batch_{batch}_mb_per_s"), theirs);
    }
    for contender in ours {
        let ours = median(contender.mb_per_s);
        tell(&contender.name, ours, "ib_read_bw", ib_read_bw);
        if contender.name == "fetch_2_qps_unverified" {
            let ratio = ours / ib_read_bw;
            guest::figure("unverified_by_ib_read_bw_goal_0.95", ratio);
        }
        for (batch, theirs) in BATCHES.iter().zip(theirs) {
            if contender.name == format!("fetch_batch_{batch}_verify_always") {
                let name = format!("verified_by_mooncake_batch_{batch}_goal_1.2");
                guest::figure(&name, ours / theirs);
            }
        }
    }
    guest::figure("xxh3_of_chunks_mb_per_s", hashing_mb_per_s());
    Ok(())
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_peer_has_nothing_to_do_while_its_memory_is_read() -> Result<()> {
    // From the second pass of many to the one before the last: connections are made before and ended after.
    const PASSES: u64 = 8;
    let served = Served::new();
    let pass_packets = RECORD_COUNT as u64 * READ_BYTES as u64 / 4096;
    let begin = guest::rail_counter(0, "rcvd_pkts");
    let passed = |passes: u64| guest::rail_counter(0, "rcvd_pkts") - begin > passes * pass_packets;
    let (ticks, clients_speed) = std::thread::scope(|scope| -> Result<_> {
        let repeat = PASSES.to_string();
        let fetch = {
            let (served, repeat) = (&served, repeat);
            scope.spawn(move || served.fetch(&["--repeat", &repeat, "--verify", "off"]))
        };
        let mut ticks = [0; 2];
        for (passes, ticks) in [1, PASSES - 1].into_iter().zip(&mut ticks) {
            while !passed(passes) && !fetch.is_finished() {
                std::thread::sleep(Duration::from_millis(5));
            }
            *ticks = served.cpu_ticks()?;
        }
        Ok((ticks[1] - ticks[0], fetch.join().expect("a fetch")?))
    })?;
    ensure!(passed(PASSES - 1), "fewer packets than bytes");
    guest::figure("fetch_mb_per_s", clients_speed);
    let gib = ((PASSES - 2) * RECORD_COUNT as u64 * READ_BYTES as u64) as f64 / (1u64 << 30) as f64;
    guest::figure("peer_cpu_seconds_per_gib", ticks as f64 / 100.0 / gib);
    Ok(())
}

fn hashing_mb_per_s() -> f64 {
    let bytes = vec![0x5a; 16 * READ_BYTES];
    let start = Instant::now();
    let mut sum = 0;
    for _ in 0..4 {
        for chunk in bytes.chunks(CHUNK_BYTES) {
            sum ^= xxh3_64(std::hint::black_box(chunk));
        }
    }
    std::hint::black_box(sum);
    4.0 * bytes.len() as f64 / start.elapsed().as_secs_f64() / 1e6
}

/// The other engine, in two processes of its own, as `scripts/kernel-test` installed it.
struct Mooncake {
    command: String,
    agent: Agent,
}

impl Mooncake {
    const BYTES: usize = RECORD_COUNT * READ_BYTES;

    fn new() -> Result<Self> {
        let python = std::env::var("KERNEL_TEST_MOONCAKE")
            .context("KERNEL_TEST_MOONCAKE: this runs inside a guest of `make kernel-test`")?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernel/mooncake_read.py");
        Ok(Self {
            command: format!("{python} {}", script.display()),
            agent: Agent::of_the_run()?,
        })
    }

    /// Starts the process that is read from; gives its segment and the address in it.
    fn serve(&self) -> Result<String> {
        let command = format!(
            "MC_GID_INDEX=1 exec {} serve 10.77.0.1 rxe0 {}",
            self.command,
            Self::BYTES
        );
        self.agent.spawn("mooncake", &command)?;
        let line = self.agent.wait_line("mooncake", "serving ", LONG)?;
        let (_, at) = line.split_once("serving ").context("an address")?;
        Ok(at.to_owned())
    }

    /// Lets the process that is read from run, or stand still: its threads poll all the time.
    fn wake(&self, is_awake: bool) -> Result<()> {
        let signal = match is_awake {
            true => Signal::Cont,
            false => Signal::Stop,
        };
        Ok(self.agent.kill("mooncake", signal)?)
    }

    /// READs everything so often at each batch size, and gives MB/s.
    fn read(&self, at: &str, passes: usize, batches: &[usize]) -> Result<Vec<f64>> {
        let batches: Vec<String> = batches.iter().map(usize::to_string).collect();
        let (first, rest) = self.command.split_once(' ').context("a script")?;
        let output = binary::run(
            Command::new(first)
                .env("MC_GID_INDEX", "1")
                .args([rest, "read", "10.77.0.1", "rxe0"])
                .args(at.split(' '))
                .args([Self::BYTES, READ_BYTES, passes].map(|n| n.to_string()))
                .args(batches),
        )
        .succeeded();
        let seconds = output.stdout.lines().filter_map(|line| {
            let (_, rest) = line.strip_prefix("batch ")?.split_once(": ")?;
            rest.strip_suffix(" s")?.parse::<f64>().ok()
        });
        let bytes = (passes * Self::BYTES) as f64;
        Ok(seconds.map(|s| bytes / s / 1e6).collect())
    }
}

impl Drop for Mooncake {
    fn drop(&mut self) {
        let _ = self.agent.kill("mooncake", Signal::Kill);
    }
}
