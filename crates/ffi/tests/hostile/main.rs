//! Safe calls that could corrupt memory: each is refused, or works as documented.

// The tests of the build script's search.
#[path = "../../build/cuda_headers.rs"]
mod cuda_headers;
mod functions;
#[cfg(feature = "distributed")]
mod groups;
mod hooks;
mod ops;
#[cfg(feature = "distributed")]
mod reducers;

use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

use tch::{Device, Kind};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Runs a test that hangs if it fails, with a time limit. One test at a time: objects that are destroyed at the end of
/// a backward pass wait until no pass is under way in the whole process.
fn ends(test: impl FnOnce() + Send + 'static) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (done, ended) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    match ended.recv_timeout(Duration::from_secs(1800)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        _ => thread.join().unwrap(),
    }
}

/// With the linker's --as-needed, a plain tch program does not load libtorch_cuda; a program with this crate must.
#[cfg(target_os = "linux")]
#[test]
fn libtorch_cuda_is_loaded_where_it_exists() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libtorch = maps.lines().find_map(|line| Some(&line[line.find('/')?..line.rfind("/libtorch_cpu.so")?]));
    let exists = std::fs::exists(format!("{}/libtorch_cuda.so", libtorch.unwrap()));
    assert_eq!(maps.contains("libtorch_cuda.so"), exists.unwrap());
}
