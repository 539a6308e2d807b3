//! Listens on the loopback interface and hands requests to the view.
//!
//! A caller without the token holds a connection for a few seconds only, however it sends, and no connection
//! that another caller needs: where there are too many, the oldest connection without a token ends.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{HOST, IF_RANGE, RANGE};
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::super::View;
use super::super::answer::answer;
use super::response::{Gate, Reply, refusal, text};
use crate::failure::Failure;

/// Maximum number of connections. Above it, the oldest connection without a token ends; if all have sent the
/// token, further connections wait.
const CONNECTIONS_MAX: usize = 64;
/// Time until a connection has sent a complete request with the token.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time until the next request on a connection that has sent the token is complete.
const REQUEST_TIMEOUT: Duration = Duration::from_mins(1);
/// Pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Server that listens and does not answer yet.
#[derive(Debug)]
pub(crate) struct Server {
    listener: TcpListener,
    gate: Gate,
}

impl Server {
    /// Listens on a port of the loopback interface, 0 for any, under a new random token.
    ///
    /// # Errors
    /// [`Failure::Failed`] if the port is in use, or the system has no random numbers.
    pub(crate) async fn bind(port: u16) -> Result<Self, Failure> {
        let failed =
            |error: std::io::Error| Failure::Failed(format!("could not listen on 127.0.0.1:{port}: {error}"));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let mut random = [0; size_of::<u128>()];
        getrandom::fill(&mut random)
            .map_err(|error| Failure::Failed(format!("could not draw a random token: {error}")))?;
        let token = format!("{:032x}", u128::from_ne_bytes(random));
        Ok(Self { listener, gate: Gate { token, port } })
    }

    /// Returns the page address with the token.
    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/{}/", self.gate.port, self.gate.token)
    }

    /// Answers requests until `stopped` is ready; requests in progress are then dropped.
    pub(crate) async fn run(self, view: Arc<View>, stopped: impl Future<Output = ()>) {
        let Self { listener, gate } = self;
        let (gate, connections) = (Arc::new(gate), Arc::new(Semaphore::new(CONNECTIONS_MAX)));
        let mut strangers = Strangers::default();
        let accept = async {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        if connections.available_permits() == 0 {
                            strangers.end_oldest();
                        }
                        let Ok(permit) = connections.clone().acquire_owned().await else { return };
                        let caller = strangers.add();
                        tokio::spawn(serve(stream, view.clone(), gate.clone(), caller, permit));
                    }
                    // Such as too many open files: the next one may succeed.
                    Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
                }
            }
        };
        tokio::select! {
            () = accept => {}
            () = stopped => {}
        }
    }
}

/// Facts about a connection's caller.
#[derive(Debug, Default)]
struct Caller {
    has_token: AtomicBool,
    /// Ends the connection.
    end: Notify,
}

/// Connections that have not sent the token, oldest first, and some that have since.
#[derive(Debug, Default)]
struct Strangers {
    callers: VecDeque<Arc<Caller>>,
}

impl Strangers {
    fn add(&mut self) -> Arc<Caller> {
        // Only the server holds callers whose connections have ended.
        self.callers
            .retain(|caller| Arc::strong_count(caller) > 1 && !caller.has_token.load(Ordering::Relaxed));
        let caller = Arc::<Caller>::default();
        self.callers.push_back(caller.clone());
        caller
    }

    fn end_oldest(&mut self) {
        while let Some(caller) = self.callers.pop_front() {
            if Arc::strong_count(&caller) > 1 && !caller.has_token.load(Ordering::Relaxed) {
                caller.end.notify_one();
                return;
            }
        }
    }
}

/// Answers the requests on a connection.
async fn serve(
    stream: TcpStream,
    view: Arc<View>,
    gate: Arc<Gate>,
    caller: Arc<Caller>,
    permit: OwnedSemaphorePermit,
) {
    let known = caller.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        // No route reads a body.
        let (view, gate, caller, request) = (view.clone(), gate.clone(), known.clone(), request.map(drop));
        async move { Ok::<_, Infallible>(respond(view, &gate, &caller, &request).await) }
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(REQUEST_TIMEOUT);
    let stranger = async {
        let too_long = tokio::time::sleep(TOKEN_TIMEOUT);
        tokio::select! {
            () = caller.end.notified() => {}
            () = too_long => {}
        }
        if caller.has_token.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        // A browser that closes the connection early is not a server error.
        _ = http.serve_connection(TokioIo::new(stream), service) => {}
        () = stranger => {}
    }
    drop(permit);
}

async fn respond(view: Arc<View>, gate: &Gate, caller: &Caller, request: &Request<()>) -> Reply {
    let (uri, headers) = (request.uri(), request.headers());
    let authority = uri.authority().map(hyper::http::uri::Authority::as_str);
    let host = single(headers, HOST);
    let route =
        gate.route(request.method().as_str(), uri.path(), uri.query().unwrap_or_default(), host, authority);
    let route = match route {
        Ok(route) => route,
        Err(refused) => return refusal(&refused),
    };
    caller.has_token.store(true, Ordering::Relaxed);
    // Without validators, a condition on a range is never met.
    let range = single(headers, RANGE).filter(|_| !headers.contains_key(IF_RANGE)).map(str::to_owned);
    let runtime = tokio::runtime::Handle::current();
    // Reading local shards and decoding block their thread.
    let work = tokio::task::spawn_blocking(move || runtime.block_on(answer(&view, route, range.as_deref())));
    work.await.unwrap_or_else(|_| {
        text(StatusCode::INTERNAL_SERVER_ERROR, "the request failed in the server, which goes on")
    })
}

/// Returns the text in a header that occurs exactly once.
fn single(headers: &HeaderMap, name: hyper::header::HeaderName) -> Option<&str> {
    let mut values = headers.get_all(name).iter();
    let first = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(first)
}
