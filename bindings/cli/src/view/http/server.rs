//! Listens on the loopback interface and hands requests to the view.

use std::convert::Infallible;
use std::future::Future;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{HOST, IF_RANGE, RANGE};
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::super::View;
use super::super::answer::answer;
use super::request::Gate;
use super::response::{Reply, refusal, text};
use crate::failure::Failure;

/// Most connections; further ones wait.
const CONNECTIONS_MAX: usize = 64;
/// Longest time until a request is complete, also for the next one of a connection.
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

    /// Returns the address of the page, with the token.
    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/{}/", self.gate.port, self.gate.token)
    }

    /// Answers requests until `stopped` is ready; requests in progress are then dropped.
    pub(crate) async fn run(self, view: Arc<View>, stopped: impl Future<Output = ()>) {
        let Self { listener, gate } = self;
        let (gate, connections) = (Arc::new(gate), Arc::new(Semaphore::new(CONNECTIONS_MAX)));
        let accept = async {
            loop {
                let Ok(permit) = connections.clone().acquire_owned().await else { return };
                match listener.accept().await {
                    Ok((stream, _)) => {
                        tokio::spawn(serve(stream, view.clone(), gate.clone(), permit));
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

/// Answers the requests of one connection.
async fn serve(stream: TcpStream, view: Arc<View>, gate: Arc<Gate>, permit: OwnedSemaphorePermit) {
    let service = service_fn(move |request: Request<Incoming>| {
        // No route takes a body.
        let (view, gate, request) = (view.clone(), gate.clone(), request.map(drop));
        async move { Ok::<_, Infallible>(respond(view, &gate, &request).await) }
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(REQUEST_TIMEOUT);
    // A browser that closes its connection early is not an error of the server.
    drop(http.serve_connection(TokioIo::new(stream), service).await);
    drop(permit);
}

async fn respond(view: Arc<View>, gate: &Gate, request: &Request<()>) -> Reply {
    let (uri, headers) = (request.uri(), request.headers());
    let authority = uri.authority().map(hyper::http::uri::Authority::as_str);
    let host = single(headers, HOST);
    let route =
        gate.route(request.method().as_str(), uri.path(), uri.query().unwrap_or_default(), host, authority);
    let route = match route {
        Ok(route) => route,
        Err(refused) => return refusal(&refused),
    };
    // Without validators, a condition on a range is never met.
    let range = single(headers, RANGE).filter(|_| !headers.contains_key(IF_RANGE)).map(str::to_owned);
    let runtime = tokio::runtime::Handle::current();
    // Reading local shards and decoding block their thread.
    let work = tokio::task::spawn_blocking(move || runtime.block_on(answer(&view, route, range.as_deref())));
    work.await.unwrap_or_else(|_| {
        text(StatusCode::INTERNAL_SERVER_ERROR, "the request failed in the server, which goes on")
    })
}

/// Returns the text of a header that occurs exactly once.
fn single(headers: &HeaderMap, name: hyper::header::HeaderName) -> Option<&str> {
    let mut values = headers.get_all(name).iter();
    let first = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(first)
}
