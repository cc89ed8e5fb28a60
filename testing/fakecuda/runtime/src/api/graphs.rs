//! Graphs that captures have made.

use std::ffi::{CStr, c_char};

use super::code;
use crate::error::CudaError;
use crate::graph::Difference;
use crate::world::world;

/// `cudaGraphInstantiateFlags`: freeing at launch, upload, launch from the device, priorities of nodes.
const FLAGS: u64 = 15;

/// # Safety
/// `executable` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGraphInstantiateWithFlags(executable: *mut usize, graph: usize, flags: u64) -> i32 {
    if executable.is_null() || flags > FLAGS {
        return code(Err(CudaError::INVALID_VALUE));
    }
    let mut world = world();
    let Some(graph) = world.graphs.graphs.get(&graph).cloned() else { return code(Err(CudaError::INVALID_VALUE)) };
    world.count("graphs instantiated", 1);
    let handle = world.instantiate(graph);
    // SAFETY: as the caller says, and it is not null.
    unsafe { *executable = handle };
    0
}

/// # Safety
/// As `cudaGraphInstantiateWithFlags`, which it is since CUDA 12.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGraphInstantiate(executable: *mut usize, graph: usize, flags: u64) -> i32 {
    // SAFETY: as the caller says.
    unsafe { cudaGraphInstantiateWithFlags(executable, graph, flags) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphLaunch(executable: usize, stream: usize) -> i32 {
    let mut world = world();
    code(world.stream(stream).and_then(|stream| world.launch_graph(executable, stream)))
}

/// `cudaGraphExecUpdateResultInfo`.
#[repr(C)]
pub struct UpdateResult {
    result: i32,
    node: usize,
    from: usize,
}

/// # Safety
/// `result` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGraphExecUpdate(executable: usize, graph: usize, result: *mut UpdateResult) -> i32 {
    // `cudaGraphExecUpdateResult`.
    const SUCCESS: i32 = 0;
    const FAILED: i32 = 1;
    const TOPOLOGY_CHANGED: i32 = 2;
    const NODE_TYPE_CHANGED: i32 = 3;
    let mut world = world();
    let graphs = &mut world.graphs;
    let (own, error) = match (graphs.executables.get_mut(&executable), graphs.graphs.get(&graph)) {
        (Some(executable), Some(graph)) => match executable.graph.difference(graph) {
            None => {
                // What was launched before keeps its own nodes.
                executable.graph = graph.clone().into();
                (UpdateResult { result: SUCCESS, node: 0, from: 0 }, Ok(()))
            }
            Some(difference) => {
                let (result, node) = match difference {
                    Difference::Topology(node) => (TOPOLOGY_CHANGED, node),
                    Difference::Kind(node) => (NODE_TYPE_CHANGED, node),
                };
                (UpdateResult { result, node, from: 0 }, Err(CudaError::GRAPH_UPDATE_FAILURE))
            }
        },
        _ => (UpdateResult { result: FAILED, node: 0, from: 0 }, Err(CudaError::INVALID_VALUE)),
    };
    if !result.is_null() {
        // SAFETY: as the caller says.
        unsafe { result.write(own) };
    }
    code(error)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphDestroy(graph: usize) -> i32 {
    code(world().graphs.graphs.remove(&graph).map(drop).ok_or(CudaError::INVALID_VALUE))
}

/// What was launched still runs.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGraphExecDestroy(executable: usize) -> i32 {
    let mut world = world();
    let removed = world.graphs.executables.remove(&executable).ok_or(CudaError::INVALID_VALUE);
    code(removed.map(|own| {
        world.progress.end_event(own.launched);
    }))
}

/// Writes handles, or only how many there are if `places` is null: the rest of the places becomes null.
///
/// # Safety
/// `places` has to be null or valid for writes of `*count` handles, `count` null or valid for reads and writes.
unsafe fn list(own: Option<Vec<usize>>, places: *mut usize, count: *mut usize) -> i32 {
    let Some(own) = own.filter(|_| !count.is_null()) else { return code(Err(CudaError::INVALID_VALUE)) };
    // SAFETY: as the caller says, and the count is not null.
    unsafe {
        if places.is_null() {
            *count = own.len();
            return 0;
        }
        for place in 0..*count {
            *places.add(place) = own.get(place).copied().unwrap_or(0);
        }
        *count = own.len().min(*count);
    }
    0
}

/// # Safety
/// As the documentation says: `nodes` null or valid for `*count` handles, `count` valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize) -> i32 {
    let own = world().graphs.graphs.get(&graph).map(crate::graph::Graph::real_nodes);
    // SAFETY: as the caller says.
    unsafe { list(own, nodes, count) }
}

/// No edge has data: what is given for it becomes 0.
///
/// # Safety
/// As `cudaGraphGetNodes`; `edges` null or valid for writes of `*count` `cudaGraphEdgeData`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGraphNodeGetDependencies(
    node: usize,
    nodes: *mut usize,
    edges: *mut [u8; 8],
    count: *mut usize,
) -> i32 {
    if !edges.is_null() && nodes.is_null() {
        return code(Err(CudaError::INVALID_VALUE));
    }
    let own = world().graphs.graphs.values().find_map(|graph| graph.dependencies(node));
    if let (Some(own), false, false) = (&own, edges.is_null(), count.is_null()) {
        // SAFETY: as the caller says.
        unsafe { edges.write_bytes(0, own.len().min(*count)) };
    }
    // SAFETY: as the caller says.
    unsafe { list(own, nodes, count) }
}

/// Writes the graph in the language of Graphviz; the flags, which ask for more, are not looked at.
///
/// # Safety
/// `path` has to be null or a text that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGraphDebugDotPrint(graph: usize, path: *const c_char, _flags: u32) -> i32 {
    let Some(dot) = world().graphs.graphs.get(&graph).map(crate::graph::Graph::dot).filter(|_| !path.is_null()) else {
        return code(Err(CudaError::INVALID_VALUE));
    };
    // SAFETY: as the caller says, and it is not null.
    let path = unsafe { CStr::from_ptr(path) }.to_string_lossy();
    code(std::fs::write(path.as_ref(), dot).map_err(|_| CudaError::OPERATING_SYSTEM))
}
