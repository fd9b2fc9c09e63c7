//! Memory: the right to pin it, and whether there is enough.

use expert_arena::{MEMLOCK_ADVICE, SystemMemory};

use crate::Options;
use crate::finding::{Check, Finding, Level};
use crate::port::Rails;
use crate::store::Audited;
use crate::system::{System, human};

pub(crate) fn check(
    out: &mut Vec<Finding>,
    options: &Options,
    system: &System,
    rails: &Rails,
    store: Option<&Audited>,
) {
    out.push(memlock(options, system, rails, store));
    out.push(floor(options, system));
    out.push(huge_pages(system));
    out.push(page_size(system.page_bytes));
}

/// The kernel counts each registration on each rail.
fn memlock(options: &Options, system: &System, rails: &Rails, store: Option<&Audited>) -> Finding {
    let Some(limit) = system.memlock_bytes() else {
        return Finding::ok(Check::Memlock, "locked memory is not limited");
    };
    if system.may_lock_all() {
        let what = format!(
            "the limit of {limit} bytes on locked memory does not count: this process has CAP_IPC_LOCK"
        );
        return Finding::ok(Check::Memlock, what);
    }
    let arena_rails = rails.chosen.len().max(1) as u64;
    let served_rails = rails.usable.len().max(1) as u64;
    let arena = options
        .arena_bytes
        .map(|bytes| bytes.saturating_mul(arena_rails));
    let served = store.map(|s| s.bytes.saturating_mul(served_rails));
    // Without a port nothing is registered.
    let level = match rails.usable.is_empty() {
        true => Level::Warning,
        false => options.verbs_level(),
    };
    let (need, of) = match (arena, served) {
        (None, None) => {
            return Finding::trouble(
                level,
                Check::Memlock,
                format!(
                    "locked memory is limited to {limit} bytes; the need is rails x bytes of the arena, or of the store that is served"
                ),
                "one-sided READs need all of it locked, TCP does not; name the size with --arena-gb or --store to compare",
                MEMLOCK_ADVICE,
            );
        }
        (Some(bytes), _) if served.is_none_or(|s| s <= bytes) => {
            (bytes, format!("an arena on {arena_rails} rails"))
        }
        _ => (
            served.unwrap_or(0),
            format!("serving the store on {served_rails} rails"),
        ),
    };
    if need <= limit {
        let what = format!("{of} needs {need} bytes of locked memory, the limit is {limit}");
        return Finding::ok(Check::Memlock, what);
    }
    Finding::trouble(
        level,
        Check::Memlock,
        format!("locked memory is limited to {limit} bytes; {of} needs {need}"),
        "registering the memory fails; TCP works without locked memory",
        MEMLOCK_ADVICE,
    )
}

fn floor(options: &Options, system: &System) -> Finding {
    let Some(memory) = SystemMemory::below(system.root()) else {
        return Finding::trouble(
            Level::Warning,
            Check::MemoryFloor,
            "/proc/meminfo does not say how much memory is available",
            "an arena is refused unless it is told to leave nothing free",
            "mount -t proc proc /proc    (or fetch with --reserve-gb 0)",
        );
    };
    let need = options.arena_bytes.unwrap_or(0);
    let reserve = options
        .reserve_bytes
        .unwrap_or_else(|| memory.default_reserve_bytes(need));
    let available = memory.available_bytes;
    let for_arena = match options.arena_bytes {
        Some(bytes) => format!("an arena of {}", human(bytes)),
        None => "an arena".to_owned(),
    };
    let what = format!(
        "{} of {} are available to this process (control groups counted), {} are to stay free",
        human(available),
        human(memory.total_bytes),
        human(reserve)
    );
    if available >= reserve.saturating_add(need) {
        return Finding::ok(
            Check::MemoryFloor,
            format!(
                "{what}: room for {} more",
                human(available - reserve - need)
            ),
        );
    }
    // Without a size it is not known whether an arena is wanted here at all.
    let level = match options.arena_bytes {
        Some(_) => Level::Failure,
        None => Level::Warning,
    };
    Finding::trouble(
        level,
        Check::MemoryFloor,
        what,
        format!("{for_arena} is refused: a machine of which everything is pinned stands still"),
        format!(
            "free memory, raise the container's limit, use a smaller arena, or leave less free: --reserve-gb {:.1}",
            available.saturating_sub(need) as f64 / 2e9
        ),
    )
}

fn huge_pages(system: &System) -> Finding {
    let dir = "sys/kernel/mm/hugepages";
    let mut pools = Vec::new();
    for name in system.names(dir) {
        let Some(size) = name.strip_prefix("hugepages-") else {
            continue;
        };
        let free = system
            .number(&format!("{dir}/{name}/free_hugepages"))
            .unwrap_or(0);
        if free > 0 {
            pools.push(format!("{free} of {size}"));
        }
    }
    let transparent = system.text("sys/kernel/mm/transparent_hugepage/enabled");
    let is_on = transparent
        .as_deref()
        .is_some_and(|t| !t.contains("[never]"));
    let pool = match pools.is_empty() {
        true => "no huge pages are set aside".to_owned(),
        false => format!("huge pages set aside and free: {}", pools.join(", ")),
    };
    let what = match (&transparent, is_on) {
        (None, _) => format!("{pool}, and this kernel has no transparent ones"),
        (_, true) => format!("{pool}, transparent ones are given to those who ask"),
        (_, false) => format!("{pool}, transparent ones are switched off"),
    };
    if is_on || !pools.is_empty() {
        return Finding::ok(Check::HugePages, what);
    }
    Finding::trouble(
        Level::Warning,
        Check::HugePages,
        what,
        "arenas and copies are in small pages: registering them takes longer, and a card looks up more addresses",
        "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled",
    )
}

fn page_size(bytes: usize) -> Finding {
    Finding::ok(Check::PageSize, format!("pages of {} KiB", bytes >> 10))
}

/// Whether a peer could serve the store by one-sided READs, for which its bytes are pinned.
pub(crate) fn store_memory(options: &Options, system: &System, store: &Audited) -> Option<Finding> {
    let memory = SystemMemory::below(system.root())?;
    let reserve = options
        .reserve_bytes
        .unwrap_or_else(|| memory.default_reserve_bytes(store.bytes));
    let room = memory.available_bytes.saturating_sub(reserve);
    let what = format!(
        "serving the store by one-sided READs pins {}, {} can be pinned",
        human(store.bytes),
        human(room)
    );
    if store.bytes <= room {
        return Some(Finding::ok(Check::StoreMemory, what));
    }
    Some(Finding::trouble(
        Level::Warning,
        Check::StoreMemory,
        what,
        "a peer on this machine serves the store over TCP alone; what does not fit into the page cache comes from the disk",
        "free memory, raise the container's limit, or serve a part: atlas-expert index --shard 1/2",
    ))
}
