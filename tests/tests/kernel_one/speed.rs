//! How fast READs are beside other programs, in the same guest, over the same device, of the same sizes. The figures go
//! to the report; what is asserted is that everything came, never how long it took.

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
const ROUNDS: usize = 3;
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

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_fetch_is_timed_beside_ib_read_bw() -> Result<()> {
    let agent = Agent::of_the_run()?;
    let served = Served::new();
    let variants = [
        ("fetch_1_qp_unverified", ["1", "off"]),
        ("fetch_2_qps_unverified", ["2", "off"]),
        ("fetch_1_qp_verified", ["1", "always"]),
        ("fetch_2_qps_verified", ["2", "always"]),
    ];
    let mut yardstick = Vec::new();
    let mut ours = vec![Vec::new(); variants.len()];
    for _ in 0..ROUNDS {
        yardstick.push(guest::ib_read_bw(
            &agent,
            0,
            READ_BYTES,
            RECORD_COUNT,
            LONG,
        )?);
        for ((_, [qps, verify]), ours) in variants.iter().zip(&mut ours) {
            // Eight records in flight, and the next four asked for when four are there.
            let flags = ["--batch", "4", "--depth", "2"];
            let flags = [&flags[..], &["--qps-per-rail", qps, "--verify", verify]].concat();
            ours.push(served.fetch(&flags)?);
        }
    }
    let yardstick = median(yardstick);
    guest::figure("ib_read_bw_mb_per_s", yardstick);
    for ((name, _), ours) in variants.iter().zip(ours) {
        tell(name, median(ours), "ib_read_bw", yardstick);
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

    /// READs everything at each batch size, and gives MB/s.
    fn read(&self, at: &str, batches: &[usize]) -> Result<Vec<f64>> {
        let batches: Vec<String> = batches.iter().map(usize::to_string).collect();
        let (first, rest) = self.command.split_once(' ').context("a script")?;
        let output = binary::run(
            Command::new(first)
                .env("MC_GID_INDEX", "1")
                .args([rest, "read", "10.77.0.1", "rxe0"])
                .args(at.split(' '))
                .args([Self::BYTES.to_string(), READ_BYTES.to_string()])
                .args(batches),
        )
        .succeeded();
        let seconds = output.stdout.lines().filter_map(|line| {
            let (_, rest) = line.strip_prefix("batch ")?.split_once(": ")?;
            rest.strip_suffix(" s")?.parse::<f64>().ok()
        });
        Ok(seconds.map(|s| Self::BYTES as f64 / s / 1e6).collect())
    }
}

impl Drop for Mooncake {
    fn drop(&mut self) {
        let _ = self.agent.kill("mooncake", Signal::Kill);
    }
}

#[test]
#[ignore = "needs the kernel rig: make kernel-test"]
fn verbs_fetch_is_timed_beside_mooncake() -> Result<()> {
    const BATCHES: [usize; 2] = [1, 8];
    let served = Served::new();
    let mooncake = Mooncake::new()?;
    let at = mooncake.serve()?;
    let mut theirs = [Vec::new(), Vec::new()];
    let mut ours = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        mooncake.wake(true)?;
        let speeds = mooncake.read(&at, &BATCHES)?;
        mooncake.wake(false)?;
        ensure!(speeds.len() == BATCHES.len(), "{speeds:?}");
        for (i, speed) in speeds.into_iter().enumerate() {
            theirs[i].push(speed);
            let batch = BATCHES[i].to_string();
            let flags = ["--batch", &batch, "--depth", "1", "--verify", "off"];
            ours[i].push(served.fetch(&flags)?);
        }
    }
    for (batch, (theirs, ours)) in BATCHES.iter().zip(theirs.into_iter().zip(ours)) {
        let theirs = median(theirs);
        guest::figure(&format!("mooncake_batch_{batch}_mb_per_s"), theirs);
        let name = format!("fetch_batch_{batch}");
        tell(&name, median(ours), "mooncake", theirs);
    }
    Ok(())
}
